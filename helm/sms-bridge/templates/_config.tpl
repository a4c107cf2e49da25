{{/* The app's config.yaml: the values in `config`, and over them what the chart knows better. */}}
{{- define "sms-bridge.config" -}}
{{- $v := .Values }}
{{- $secrets := include "sms-bridge.secretsDir" . }}
{{- $set := dict "rabbitmq" (include "sms-bridge.config.rabbitmq" . | fromYaml) "admin" (dict "host" "0.0.0.0" "port" 9090) }}
{{- if $v.worker.enabled }}
{{- $api := dict "base_url" $v.smsApi.baseUrl "timeout_seconds" $v.smsApi.timeoutSeconds "key_file" (printf "%s/sms-api/key" $secrets) }}
{{- if $v.smsApi.caSecret.name }}{{ $_ := set $api "ca_file" (printf "%s/sms-api/ca.crt" $secrets) }}{{ end }}
{{- $_ := set $set "sms_api" $api }}
{{- $_ := set $set "worker" (dict "shutdown_timeout_seconds" $v.worker.shutdownTimeoutSeconds) }}
{{- end }}
{{- if $v.webhook.enabled }}
{{- $files := list }}
{{- range $v.webhookSecrets.secretKeys }}{{ $files = append $files (printf "%s/webhook/%s" $secrets .) }}{{ end }}
{{- $_ := set $set "webhook" (dict "host" "0.0.0.0" "port" 8080 "path" $v.webhook.path "secret_files" $files "shutdown_timeout_seconds" $v.webhook.shutdownTimeoutSeconds) }}
{{- end }}
{{- toYaml (mergeOverwrite (deepCopy $v.config) $set) }}
{{- end }}

{{- define "sms-bridge.config.rabbitmq" -}}
{{- $dir := printf "%s/rabbitmq" (include "sms-bridge.secretsDir" .) }}
{{- with .Values.rabbitmq }}
{{- $scheme := ternary "amqps" "amqp" .tls.enabled }}
{{- $port := .port | default (ternary 5671 5672 .tls.enabled) | int }}
url: {{ printf "%s://%s:%d/%s" $scheme .host $port (urlquery .vhost | replace "+" "%20") | quote }}
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
