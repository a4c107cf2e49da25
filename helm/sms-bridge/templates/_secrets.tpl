{{/* Where the pods find their files. */}}
{{- define "sms-bridge.configDir" -}}/etc/sms-bridge/config{{- end }}
{{- define "sms-bridge.secretsDir" -}}/etc/sms-bridge/secrets{{- end }}

{{/*
The Secret of a credential: one that exists, or one that an operator makes; empty when neither is
asked for. Takes root and credential (rabbitmq, smsApi or webhookSecrets).
*/}}
{{- define "sms-bridge.secretName" -}}
{{- $v := .root.Values }}
{{- $full := include "sms-bridge.fullname" .root }}
{{- if (get $v .credential).existingSecret }}{{ (get $v .credential).existingSecret }}
{{- else if and $v.externalSecrets.enabled (get $v.externalSecrets.remoteRefs .credential) }}
{{- printf "%s-%s" $full (include "sms-bridge.externalSecretSuffix" .credential) }}
{{- else if and (eq .credential "rabbitmq") $v.topology.enabled $v.topology.createUser }}
{{- /* The messaging topology operator names it so. */}}
{{- printf "%s-user-credentials" $full }}
{{- end }}
{{- end }}

{{/* The keys that the broker's Secret must hold. */}}
{{- define "sms-bridge.rabbitmqKeys" -}}
{{- with .Values.rabbitmq.secretKeys }}{{ list .username .password .host .port | compact | toJson }}{{ end }}
{{- end }}

{{/*
The keys of the Secret that the worker logs in with at the SMS service, by the file of each. Without
a login there need be none; where there is one, the key may stand in the body ({secret}).
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

{{/* Not empty where the credentials are given to the topology operator rather than made by it. */}}
{{- define "sms-bridge.importsUser" -}}
{{- if or .Values.rabbitmq.existingSecret (and .Values.externalSecrets.enabled .Values.externalSecrets.remoteRefs.rabbitmq) }}yes{{ end }}
{{- end }}

{{- define "sms-bridge.externalSecretSuffix" -}}
{{- get (dict "rabbitmq" "rabbitmq" "smsApi" "sms-api" "webhookSecrets" "webhook") . }}
{{- end }}

{{/* The files of a pod, below whole directories: a subPath mount would never see a rotated Secret. */}}
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

{{/* Takes what secretSources takes. */}}
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
The Secret files of these roles, and no others. The paths are those that the config names. Takes
root, roles and, in place of the Secret of the bridge's broker user, brokerSecret.
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
