{{/* The bridge's config.yaml: the values in `config`, overridden by the settings that the chart writes. */}}
{{- define "sms-bridge.config" -}}
{{- /* The operator creates the queues, so the bridge only verifies them, unless `config` says otherwise. */}}
{{- $base := dict }}
{{- if .Values.topology.enabled }}{{ $base = dict "rabbitmq" (dict "topology" "verify") }}{{ end }}
{{- toYaml (mergeOverwrite $base (deepCopy .Values.config) (include "sms-bridge.config.own" . | fromJson)) }}
{{- end }}

{{/* The settings that the chart writes, by section and key. */}}
{{- define "sms-bridge.config.own" -}}
{{- $v := .Values }}
{{- $secrets := include "sms-bridge.secretsDir" . }}
{{- $set := dict "rabbitmq" (include "sms-bridge.config.rabbitmq" . | fromYaml) "admin" (dict "host" "0.0.0.0" "port" (int $v.admin.port)) }}
{{- if $v.worker.enabled }}
{{- $api := dict "timeout_seconds" $v.smsApi.timeoutSeconds }}
{{- $url := $v.smsApi.baseUrl }}
{{- $preset := $v.smsApi.preset }}
{{- if $v.sandbox.enabled }}{{ $url = include "sms-bridge.smsApiUrl" . }}{{ $preset = "generic" }}{{ end }}
{{- range $key, $value := dict "preset" $preset "base_url" $url "account" $v.smsApi.account }}
{{- if $value }}{{ $_ := set $api $key $value }}{{ end }}
{{- end }}
{{- $keys := include "sms-bridge.smsApiKeys" . | fromJson }}
{{- if $keys.key }}{{ $_ := set $api "key_file" (printf "%s/sms-api/key" $secrets) }}{{ end }}
{{- if $keys.username }}{{ $_ := set $api "auth" (dict "username_file" (printf "%s/sms-api/username" $secrets)) }}{{ end }}
{{- if $v.smsApi.caSecret.name }}{{ $_ := set $api "ca_file" (printf "%s/sms-api/ca.crt" $secrets) }}{{ end }}
{{- $_ := set $set "sms_api" $api }}
{{- $_ := set $set "worker" (dict "shutdown_timeout_seconds" $v.worker.shutdownTimeoutSeconds) }}
{{- end }}
{{- if $v.webhook.enabled }}
{{- $webhook := dict "host" "0.0.0.0" "port" (int $v.webhook.containerPort) "shutdown_timeout_seconds" $v.webhook.shutdownTimeoutSeconds }}
{{- range $endpoint := include "sms-bridge.endpoints" . | fromJsonArray }}
{{- $files := list }}
{{- range $endpoint.secretKeys }}{{ $files = append $files (printf "%s/%s/%s" $secrets $endpoint.folder .) }}{{ end }}
{{- $settings := merge (dict "path" $endpoint.path "secret_files" $files) $endpoint.config }}
{{- if $endpoint.isDefault }}{{ $webhook = merge $webhook $settings }}
{{- else }}{{ $_ := set $webhook "endpoints" (append ($webhook.endpoints | default list) $settings) }}{{ end }}
{{- end }}
{{- $_ := set $set "webhook" $webhook }}
{{- end }}
{{- toJson $set }}
{{- end }}

{{/*
The webhook endpoints: path, secretName, secretKeys, folder of the secret files, config (further
settings) and isDefault of each. webhook.path is left out if it has no Secret and there are others.
The default of public_url is built from the host of the Ingress or HTTPRoute.
*/}}
{{- define "sms-bridge.endpoints" -}}
{{- $v := .Values }}
{{- $all := list }}
{{- $secret := include "sms-bridge.secretName" (dict "root" . "credential" "webhookSecrets") }}
{{- $origin := include "sms-bridge.publicOrigin" . }}
{{- if or $secret (not $v.webhook.endpoints) }}
{{- $config := dict }}
{{- if and $origin (not $v.existingConfigMap) (not ($v.config.webhook | default dict).public_url) (not (include "sms-bridge.setsPublicUrl" .)) }}
{{- $config = dict "public_url" (print $origin $v.webhook.path) }}
{{- end }}
{{- $all = list (dict "path" $v.webhook.path "secretName" $secret "secretKeys" $v.webhookSecrets.secretKeys "folder" "webhook" "config" $config "isDefault" true) }}
{{- end }}
{{- range $number, $endpoint := $v.webhook.endpoints }}
{{- $config := $endpoint.config | default dict }}
{{- with $endpoint.preset }}{{ $config = merge (dict "preset" .) $config }}{{ end }}
{{- if and $origin (not $config.public_url) }}{{ $config = merge (dict "public_url" (print $origin $endpoint.path)) $config }}{{ end }}
{{- $all = append $all (dict "path" $endpoint.path "secretName" $endpoint.existingSecret "secretKeys" ($endpoint.secretKeys | default (list "current")) "folder" (printf "webhook-endpoints/%d" $number) "config" $config "isDefault" false) }}
{{- end }}
{{- toJson $all }}
{{- end }}

{{/*
URL of the first host of the Ingress or HTTPRoute, always https, because webhooks contain personal
data. Empty without a host, or if the host is a wildcard.
*/}}
{{- define "sms-bridge.publicOrigin" -}}
{{- $hosts := list }}
{{- if .Values.ingress.enabled }}{{ $hosts = .Values.ingress.hosts }}
{{- else if .Values.httpRoute.enabled }}{{ $hosts = .Values.httpRoute.hostnames }}
{{- end }}
{{- with $hosts | default list | first }}
{{- if not (contains "*" .) }}{{ printf "https://%s" . }}{{ end }}
{{- end }}
{{- end }}

{{/* Not empty if webhook.extraEnv sets the public URL. */}}
{{- define "sms-bridge.setsPublicUrl" -}}
{{- range .Values.webhook.extraEnv }}
{{- if eq (upper .name) "SMS_BRIDGE_WEBHOOK__PUBLIC_URL" }}{{ .name }}{{ end }}
{{- end }}
{{- end }}

{{/*
The environment variables of these roles: the path of config.yaml, and settings that override it.
The chart cannot change an existing ConfigMap, so its own settings become variables then. Takes
root and roles.
*/}}
{{- define "sms-bridge.env" -}}
{{- $v := .root.Values -}}
- name: SMS_BRIDGE_CONFIG
  value: {{ include "sms-bridge.configDir" .root }}/config.yaml
{{- range $part := list "host" "port" }}
{{- with get $v.rabbitmq.secretKeys $part }}
- name: {{ include "sms-bridge.brokerVariable" $part }}
  valueFrom:
    secretKeyRef:
      name: {{ include "sms-bridge.secretName" (dict "root" $.root "credential" "rabbitmq") | quote }}
      key: {{ . | quote }}
{{- end }}
{{- end }}
{{- $set := dict }}
{{- if $v.existingConfigMap }}
{{- $of := concat (list "rabbitmq" "admin") .roles }}
{{- /* The worker sends the address of the endpoint to the service. */}}
{{- if has "worker" .roles }}{{ $of = concat $of (list "sms_api" "webhook") }}{{ end }}
{{- range $section, $settings := include "sms-bridge.config.own" .root | fromJson }}
{{- if has $section $of }}{{ $_ := set $set $section $settings }}{{ end }}
{{- end }}
{{- if $v.topology.enabled }}{{ $_ := set $set.rabbitmq "topology" "verify" }}{{ end }}
{{- end }}
{{- if or $v.rabbitmq.secretKeys.host $v.rabbitmq.secretKeys.port }}
{{- $set = mergeOverwrite $set (dict "rabbitmq" (dict "url" (include "sms-bridge.rabbitmqUrl" .root | fromJson).value)) }}
{{- end }}
{{- include "sms-bridge.variables" (dict "prefix" "SMS_BRIDGE" "separator" "_" "settings" $set) }}
{{- end }}

{{/* Settings as variables: SMS_BRIDGE_<SECTION>__<KEY>, with another __ for each deeper level. */}}
{{- define "sms-bridge.variables" -}}
{{- range $key, $value := .settings }}
{{- $name := printf "%s%s%s" $.prefix $.separator (upper $key) }}
{{- if kindIs "map" $value }}
{{- include "sms-bridge.variables" (dict "prefix" $name "separator" "__" "settings" $value) }}
{{- else }}
- name: {{ $name }}
  value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* The preset of the SMS service. */}}
{{- define "sms-bridge.smsApiPreset" -}}
{{- .Values.smsApi.preset | default (.Values.config.sms_api | default dict).preset | default "generic" }}
{{- end }}

{{/* The URL of the SMS service: of the sandbox, from the values, or from the preset. May be empty. */}}
{{- define "sms-bridge.smsApiUrl" -}}
{{- $sandbox := "" }}
{{- if .Values.sandbox.enabled }}{{ $sandbox = printf "http://%s:%s" (include "sms-bridge.sandboxHost" .) (include "sms-bridge.sandboxPort" .) }}{{ end }}
{{- $sandbox | default .Values.smsApi.baseUrl | default (get (.Files.Get "files/sms-apis.yaml" | fromYaml) (include "sms-bridge.smsApiPreset" .)) }}
{{- end }}

{{- define "sms-bridge.configMapName" -}}
{{- .Values.existingConfigMap | default (include "sms-bridge.fullname" .) }}
{{- end }}

{{- define "sms-bridge.rabbitmqPort" -}}
{{- .Values.rabbitmq.port | default (ternary 5671 5672 .Values.rabbitmq.tls.enabled) | int }}
{{- end }}

{{/*
RabbitMQ's URL, or the list of URLs of rabbitmq.hosts, as {"value": ...}. It contains no secret. If a
Secret contains host or port, Kubernetes inserts them from variables.
*/}}
{{- define "sms-bridge.rabbitmqUrl" -}}
{{- $port := include "sms-bridge.rabbitmqPort" . }}
{{- with .Values.rabbitmq }}
{{- $scheme := ternary "amqps" "amqp" .tls.enabled }}
{{- $vhost := urlquery .vhost | replace "+" "%20" }}
{{- $host := .host }}
{{- if .secretKeys.host }}{{ $host = include "sms-bridge.brokerVariable" "host" | printf "$(%s)" }}{{ end }}
{{- if .secretKeys.port }}{{ $port = include "sms-bridge.brokerVariable" "port" | printf "$(%s)" }}{{ end }}
{{- $urls := list }}
{{- range .hosts | default (list $host) }}{{ $urls = printf "%s://%s:%s/%s" $scheme . $port $vhost | append $urls }}{{ end }}
{{- dict "value" (ternary (first $urls) $urls (empty .hosts)) | toJson }}
{{- end }}
{{- end }}

{{- define "sms-bridge.brokerVariable" -}}
{{- printf "RABBITMQ_%s" (upper .) }}
{{- end }}

{{- define "sms-bridge.config.rabbitmq" -}}
{{- $dir := printf "%s/rabbitmq" (include "sms-bridge.secretsDir" .) }}
{{- $url := (include "sms-bridge.rabbitmqUrl" . | fromJson).value }}
{{- with .Values.rabbitmq }}
{{- if not (or .secretKeys.host .secretKeys.port) }}
url: {{ toJson $url }}
{{- end }}
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

{{/*
A setting of the bridge, or its default, as {"value": ...}. Takes a list of root, section and key.
The bridge has no boolean settings: YAML reads `on` and `off` without quotes as booleans.
*/}}
{{- define "sms-bridge.setting" -}}
{{- $root := index . 0 }}{{ $section := index . 1 }}{{ $key := index . 2 }}
{{- $given := get $root.Values.config $section | default dict }}
{{- $default := index (include "sms-bridge.appDefaults" $root | fromYaml) $section $key }}
{{- $value := ternary (get $given $key) $default (hasKey $given $key) }}
{{- if kindIs "bool" $value }}{{ $value = ternary "on" "off" $value }}{{ end }}
{{- dict "value" $value | toJson }}
{{- end }}

{{/* The main queue and, if there is one, the urgent queue, as a list. */}}
{{- define "sms-bridge.requestQueues" -}}
{{- $urgent := (include "sms-bridge.setting" (list . "worker" "urgent_queue") | fromJson).value | default "" }}
{{- compact (list (include "sms-bridge.setting" (list . "worker" "queue") | fromJson).value $urgent) | toJson }}
{{- end }}

{{/* The bridge's defaults that objects other than the ConfigMap depend on. */}}
{{- define "sms-bridge.appDefaults" -}}
rabbitmq:
  topology: {{ ternary "verify" "declare" .Values.topology.enabled }}
sms_api:
  proxy: null
worker:
  queue: sms.outbound
  urgent_queue: {{ printf "%s.urgent" (get (.Values.config.worker | default dict) "queue" | default "sms.outbound") | quote }}
  retry_delays: [5s, 30s, 2m, 10m, 1h]
  outcome_exchange: null
  coordination: "on"
  ordering: none
webhook:
  exchange: sms.inbound
  queue: sms.inbound
  body_timeout_seconds: 10
  response_timeout_seconds: 2.5
tracing:
  otlp_endpoint: null
{{- end }}

{{/* The seconds of a duration such as 90, 10s, 5m, 2h or 30d, as the bridge reads it. */}}
{{- define "sms-bridge.seconds" -}}
{{- $text := toString . | trim }}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?(e[+]?[0-9]+)?\\s*[smhd]?$" $text) }}
{{- fail (printf "%q in config is no duration: write a number of seconds, or like 10s, 5m, 2h, 30d" $text) }}
{{- end }}
{{- $unit := regexFind "[smhd]$" $text }}
{{- mulf (trimSuffix $unit $text | trim | float64) (get (dict "" 1 "s" 1 "m" 60 "h" 3600 "d" 86400) $unit) }}
{{- end }}

{{/* Seconds in the largest unit that divides them, as in the names of retry queues: 120 is 2m. */}}
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
  url: rabbitmq.host or rabbitmq.hosts, rabbitmq.port and rabbitmq.vhost
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
  endpoints: webhook.endpoints
  secrets: webhookSecrets.existingSecret
  secret_files: webhookSecrets.existingSecret
  shutdown_timeout_seconds: webhook.shutdownTimeoutSeconds
admin:
  host: admin.port
  port: admin.port
{{- end }}
