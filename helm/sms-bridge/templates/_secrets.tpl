{{/* Folders of the files in the pods. */}}
{{- define "sms-bridge.configDir" -}}/etc/sms-bridge/config{{- end }}
{{- define "sms-bridge.secretsDir" -}}/etc/sms-bridge/secrets{{- end }}

{{/*
The Secret of a credential: an existing one, or one that an operator creates. May be empty. Takes
root and credential (rabbitmq, smsApi or webhookSecrets).
*/}}
{{- define "sms-bridge.secretName" -}}
{{- $v := .root.Values }}
{{- $full := include "sms-bridge.fullname" .root }}
{{- if (get $v .credential).existingSecret }}{{ (get $v .credential).existingSecret }}
{{- else if and $v.externalSecrets.enabled (get $v.externalSecrets.remoteRefs .credential) }}
{{- printf "%s-%s" $full (include "sms-bridge.externalSecretSuffix" .credential) }}
{{- else if and (eq .credential "rabbitmq") $v.topology.enabled $v.topology.createUser }}
{{- /* The messaging topology operator chooses this name. */}}
{{- printf "%s-user-credentials" $full }}
{{- end }}
{{- end }}

{{/* The keys that RabbitMQ's Secret must contain. */}}
{{- define "sms-bridge.rabbitmqKeys" -}}
{{- with .Values.rabbitmq.secretKeys }}{{ list .username .password .host .port | compact | toJson }}{{ end }}
{{- end }}

{{/*
The keys of the SMS service's Secret, by file name. With auth.scheme none, the Secret is optional. If
there is one, the body may contain the key ({secret}).
*/}}
{{- define "sms-bridge.smsApiKeys" -}}
{{- $keys := .Values.smsApi.secretKeys }}
{{- $auth := (.Values.config.sms_api | default dict).auth | default dict }}
{{- $secret := include "sms-bridge.secretName" (dict "root" . "credential" "smsApi") }}
{{- if and (eq ($auth.scheme | default "") "none") (not $secret) }}{{ $keys = pick $keys "username" }}{{ end }}
{{- $used := dict }}
{{- range $file, $key := $keys }}{{ if $key }}{{ $_ := set $used $file $key }}{{ end }}{{ end }}
{{- toJson $used }}
{{- end }}

{{/* Not empty if the topology operator imports the credentials instead of generating them. */}}
{{- define "sms-bridge.importsUser" -}}
{{- if or .Values.rabbitmq.existingSecret (and .Values.externalSecrets.enabled .Values.externalSecrets.remoteRefs.rabbitmq) }}yes{{ end }}
{{- end }}

{{- define "sms-bridge.externalSecretSuffix" -}}
{{- get (dict "rabbitmq" "rabbitmq" "smsApi" "sms-api" "webhookSecrets" "webhook") . }}
{{- end }}

{{/* Mounts whole directories, because a subPath mount never sees a rotated Secret. */}}
{{- define "sms-bridge.volumeMounts" -}}
- name: config
  mountPath: {{ include "sms-bridge.configDir" . }}
  readOnly: true
- name: secrets
  mountPath: {{ include "sms-bridge.secretsDir" . }}
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- end }}

{{/* Takes the arguments of secretSources. */}}
{{- define "sms-bridge.volumes" -}}
- name: config
  configMap:
    name: {{ include "sms-bridge.configMapName" .root }}
- name: secrets
  projected:
    defaultMode: 0440
    sources: {{- include "sms-bridge.secretSources" . | nindent 6 }}
- name: tmp
  emptyDir:
    medium: {{ .root.Values.tmp.medium | quote }}
    sizeLimit: {{ .root.Values.tmp.sizeLimit }}
{{- end }}

{{/*
The Secret files of these roles only, under the paths in the config. Takes root, roles and
brokerSecret, which replaces the Secret of the bridge's RabbitMQ user.
*/}}
{{- define "sms-bridge.secretSources" -}}
{{- $v := .root.Values }}
- secret:
    name: {{ .brokerSecret | default (include "sms-bridge.secretName" (dict "root" .root "credential" "rabbitmq")) | quote }}
    items:
      - key: {{ $v.rabbitmq.secretKeys.username | quote }}
        path: rabbitmq/username
      - key: {{ $v.rabbitmq.secretKeys.password | quote }}
        path: rabbitmq/password
{{- with $v.rabbitmq.tls }}
{{- if and .enabled .existingSecret }}
- secret:
    name: {{ .existingSecret | quote }}
    items:
      {{- with .caKey }}
      - key: {{ . | quote }}
        path: rabbitmq/ca.crt
      {{- end }}
      {{- with .certKey }}
      - key: {{ . | quote }}
        path: rabbitmq/tls.crt
      {{- end }}
      {{- with .keyKey }}
      - key: {{ . | quote }}
        path: rabbitmq/tls.key
      {{- end }}
{{- end }}
{{- end }}
{{- if has "worker" .roles }}
{{- with include "sms-bridge.smsApiKeys" .root | fromJson }}
- secret:
    name: {{ include "sms-bridge.secretName" (dict "root" $.root "credential" "smsApi") | quote }}
    items:
      {{- range $file, $key := . }}
      - key: {{ $key | quote }}
        path: sms-api/{{ $file }}
      {{- end }}
{{- end }}
{{- with $v.smsApi.caSecret }}
{{- if .name }}
- secret:
    name: {{ .name | quote }}
    items:
      - key: {{ .key | quote }}
        path: sms-api/ca.crt
{{- end }}
{{- end }}
{{- end }}
{{- if has "webhook" .roles }}
{{ include "sms-bridge.webhookSecretSources" .root }}
{{- end }}
{{- end }}

{{- define "sms-bridge.webhookSecretSources" -}}
{{- range $endpoint := include "sms-bridge.endpoints" . | fromJsonArray }}
- secret:
    name: {{ $endpoint.secretName | quote }}
    items:
      {{- range $endpoint.secretKeys }}
      - key: {{ . | quote }}
        path: {{ printf "%s/%s" $endpoint.folder . | quote }}
      {{- end }}
{{- end }}
{{- end }}
