{{/* The app's config.yaml: the values in `config`, and over them what the chart knows better. */}}
{{- define "sms-bridge.config" -}}
{{- $v := .Values }}
{{- $secrets := include "sms-bridge.secretsDir" . }}
{{- $set := dict "rabbitmq" (include "sms-bridge.config.rabbitmq" . | fromYaml) "admin" (dict "host" "0.0.0.0" "port" (int $v.admin.port)) }}
{{- if $v.worker.enabled }}
{{- $api := dict "base_url" $v.smsApi.baseUrl "timeout_seconds" $v.smsApi.timeoutSeconds "key_file" (printf "%s/sms-api/key" $secrets) }}
{{- if $v.smsApi.caSecret.name }}{{ $_ := set $api "ca_file" (printf "%s/sms-api/ca.crt" $secrets) }}{{ end }}
{{- $_ := set $set "sms_api" $api }}
{{- $_ := set $set "worker" (dict "shutdown_timeout_seconds" $v.worker.shutdownTimeoutSeconds) }}
{{- end }}
{{- if $v.webhook.enabled }}
{{- $files := list }}
{{- range $v.webhookSecrets.secretKeys }}{{ $files = append $files (printf "%s/webhook/%s" $secrets .) }}{{ end }}
{{- $_ := set $set "webhook" (dict "host" "0.0.0.0" "port" (int $v.webhook.containerPort) "path" $v.webhook.path "secret_files" $files "shutdown_timeout_seconds" $v.webhook.shutdownTimeoutSeconds) }}
{{- end }}
{{- /* What the operator creates is looked at only, unless the values say otherwise. */}}
{{- $base := dict }}
{{- if $v.topology.enabled }}{{ $base = dict "rabbitmq" (dict "topology" "verify") }}{{ end }}
{{- toYaml (mergeOverwrite $base (deepCopy $v.config) $set) }}
{{- end }}

{{- define "sms-bridge.rabbitmqPort" -}}
{{- .Values.rabbitmq.port | default (ternary 5671 5672 .Values.rabbitmq.tls.enabled) | int }}
{{- end }}

{{- define "sms-bridge.config.rabbitmq" -}}
{{- $dir := printf "%s/rabbitmq" (include "sms-bridge.secretsDir" .) }}
{{- $port := include "sms-bridge.rabbitmqPort" . }}
{{- with .Values.rabbitmq }}
url: {{ printf "%s://%s:%s/%s" (ternary "amqps" "amqp" .tls.enabled) .host $port (urlquery .vhost | replace "+" "%20") | quote }}
username_file: {{ $dir }}/username
password_file: {{ $dir }}/password
{{- with .tls }}
{{- if and .enabled (or .existingSecret .serverName) }}
tls:
  {{- if and .existingSecret .caKey }}
  ca_file: {{ $dir }}/ca.crt
  {{- end }}
  {{- if .certKey }}
  cert_file: {{ $dir }}/tls.crt
  key_file: {{ $dir }}/tls.key
  {{- end }}
  {{- with .serverName }}
  server_name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* One of the app's settings, or its default, as {"value": ...}. Takes a list of root, section and key. */}}
{{- define "sms-bridge.setting" -}}
{{- $root := index . 0 }}{{ $section := index . 1 }}{{ $key := index . 2 }}
{{- $given := get $root.Values.config $section | default dict }}
{{- $default := index (include "sms-bridge.appDefaults" $root | fromYaml) $section $key }}
{{- dict "value" (ternary (get $given $key) $default (hasKey $given $key)) | toJson }}
{{- end }}

{{/* The app's own defaults, as far as an object other than the ConfigMap depends on them. */}}
{{- define "sms-bridge.appDefaults" -}}
rabbitmq:
  topology: {{ ternary "verify" "declare" .Values.topology.enabled }}
sms_api:
  proxy: null
worker:
  queue: sms.outbound
  retry_delays: [5s, 30s, 2m, 10m, 1h]
  outcome_exchange: null
webhook:
  exchange: sms.inbound
  queue: sms.inbound
  body_timeout_seconds: 10
  response_timeout_seconds: 2.5
{{- end }}

{{/* The seconds of a duration such as 90, 10s, 5m, 2h or 30d, as the app reads it. */}}
{{- define "sms-bridge.seconds" -}}
{{- $text := toString . | trim }}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?(e[+]?[0-9]+)?\\s*[smhd]?$" $text) }}
{{- fail (printf "%q in config is no duration: write a number of seconds, or like 10s, 5m, 2h, 30d" $text) }}
{{- end }}
{{- $unit := regexFind "[smhd]$" $text }}
{{- mulf (trimSuffix $unit $text | trim | float64) (get (dict "" 1 "s" 1 "m" 60 "h" 3600 "d" 86400) $unit) }}
{{- end }}

{{/* Seconds in the largest unit that divides them: 120 is 2m. The app names its retry queues so. */}}
{{- define "sms-bridge.duration" -}}
{{- $seconds := . }}
{{- $text := printf "%gs" (float64 $seconds) }}
{{- if eq (floor $seconds) (float64 $seconds) }}
{{- range list (list "s" 1) (list "m" 60) (list "h" 3600) (list "d" 86400) }}
{{- if eq (mod (int64 $seconds) (last .)) 0 }}{{ $text = printf "%d%s" (div (int64 $seconds) (last .)) (first .) }}{{ end }}
{{- end }}
{{- end }}
{{- $text }}
{{- end }}

{{/* The settings that the chart writes itself, and the value to use instead. */}}
{{- define "sms-bridge.ownSettings" -}}
rabbitmq:
  url: rabbitmq.host, rabbitmq.port and rabbitmq.vhost
  username: rabbitmq.existingSecret
  username_file: rabbitmq.existingSecret
  password: rabbitmq.existingSecret
  password_file: rabbitmq.existingSecret
  tls: rabbitmq.tls
sms_api:
  base_url: smsApi.baseUrl
  key: smsApi.existingSecret
  key_file: smsApi.existingSecret
  ca_file: smsApi.caSecret
  timeout_seconds: smsApi.timeoutSeconds
worker:
  shutdown_timeout_seconds: worker.shutdownTimeoutSeconds
webhook:
  host: webhook.service
  port: webhook.containerPort
  path: webhook.path
  secrets: webhookSecrets.existingSecret
  secret_files: webhookSecrets.existingSecret
  shutdown_timeout_seconds: webhook.shutdownTimeoutSeconds
admin:
  host: admin.port
  port: admin.port
{{- end }}
