{{/* Every reason why these values cannot work, a sentence each, before anything is rendered. */}}
{{- define "sms-bridge.validate" -}}
{{- $v := .Values }}
{{- $faults := list }}
{{- $create := printf "kubectl create secret generic NAME --namespace %s" .Release.Namespace }}

{{- if not (or $v.worker.enabled $v.webhook.enabled) }}
{{- $faults = append $faults "worker.enabled and webhook.enabled are both false: there is nothing to deploy." }}
{{- end }}
{{- if not $v.image.repository }}
{{- $faults = append $faults (printf "image.repository is empty: name the image, without the registry %s." $v.image.registry) }}
{{- end }}

{{- with $v.rabbitmq }}
{{- if not .host }}
{{- $faults = append $faults "rabbitmq.host is empty: name the broker's host." }}
{{- end }}
{{- if not .existingSecret }}
{{- $faults = append $faults (printf "rabbitmq.existingSecret is empty: name a Secret with the keys %s and %s, made by `%s --from-literal=%s=... --from-literal=%s=...`." .secretKeys.username .secretKeys.password $create .secretKeys.username .secretKeys.password) }}
{{- end }}
{{- if and .tls.existingSecret (not .tls.enabled) }}
{{- $faults = append $faults "rabbitmq.tls.existingSecret is set but rabbitmq.tls.enabled is false: switch TLS on or take the Secret out." }}
{{- end }}
{{- if ne (empty .tls.certKey) (empty .tls.keyKey) }}
{{- $faults = append $faults "rabbitmq.tls.certKey and rabbitmq.tls.keyKey go together: a client certificate needs its private key." }}
{{- end }}
{{- if and .tls.certKey (not .tls.existingSecret) }}
{{- $faults = append $faults "rabbitmq.tls.certKey is set but rabbitmq.tls.existingSecret is empty: name the Secret with the client certificate." }}
{{- end }}
{{- if and .tls.existingSecret (not (or .tls.caKey .tls.certKey)) }}
{{- $faults = append $faults "rabbitmq.tls.existingSecret is set but caKey and certKey are both empty: name the key to use or take the Secret out." }}
{{- end }}
{{- end }}

{{- if $v.worker.enabled }}
{{- if not $v.smsApi.baseUrl }}
{{- $faults = append $faults "smsApi.baseUrl is empty: the worker needs the address of the SMS service." }}
{{- end }}
{{- if not $v.smsApi.existingSecret }}
{{- $faults = append $faults (printf "smsApi.existingSecret is empty: name a Secret with the key %s, made by `%s --from-literal=%s=...`." $v.smsApi.secretKeys.key $create $v.smsApi.secretKeys.key) }}
{{- end }}
{{- if lt (float64 $v.worker.shutdownTimeoutSeconds) (float64 $v.smsApi.timeoutSeconds) }}
{{- $faults = append $faults (printf "worker.shutdownTimeoutSeconds (%v) is below smsApi.timeoutSeconds (%v): a stopping worker would cut a request off, and nobody would know whether the SMS was sent." $v.worker.shutdownTimeoutSeconds $v.smsApi.timeoutSeconds) }}
{{- end }}
{{- end }}

{{- if $v.webhook.enabled }}
{{- if not $v.webhookSecrets.existingSecret }}
{{- $key := first $v.webhookSecrets.secretKeys }}
{{- $faults = append $faults (printf "webhookSecrets.existingSecret is empty: name a Secret with the key %s, made by `%s --from-literal=%s=...`; webhooks that nobody can verify are never taken in." $key $create $key) }}
{{- end }}
{{- end }}

{{- range $role := list "worker" "webhook" }}
{{- $r := get $v $role }}
{{- $sleep := $r.preStopSleepSeconds | default 0 }}
{{- $needed := add $sleep $r.shutdownTimeoutSeconds }}
{{- if and $r.enabled (le (int $r.terminationGracePeriodSeconds) (int $needed)) }}
{{- $faults = append $faults (printf "%s.terminationGracePeriodSeconds (%v) must exceed the %d seconds that stopping takes (preStop sleep %v + shutdownTimeoutSeconds %v), or Kubernetes kills the pod before it has finished." $role $r.terminationGracePeriodSeconds $needed $sleep $r.shutdownTimeoutSeconds) }}
{{- end }}
{{- end }}

{{- if $v.ingress.enabled }}
{{- if not $v.webhook.enabled }}
{{- $faults = append $faults "ingress.enabled is true but webhook.enabled is false: there is nothing to route to." }}
{{- end }}
{{- if not $v.ingress.hosts }}
{{- $faults = append $faults "ingress.hosts is empty: name the host that the SMS service calls." }}
{{- end }}
{{- end }}

{{- range $section, $keys := include "sms-bridge.ownSettings" . | fromYaml }}
{{- $given := get $v.config $section | default dict }}
{{- range $key, $instead := $keys }}
{{- if hasKey $given $key }}
{{- $faults = append $faults (printf "config.%s.%s is set by the chart: use %s." $section $key $instead) }}
{{- end }}
{{- end }}
{{- end }}
{{- if contains "@" (get ($v.config.sms_api | default dict) "proxy" | default "" | toString) }}
{{- $faults = append $faults "config.sms_api.proxy holds a user or a password: a ConfigMap is no place for them." }}
{{- end }}

{{- with $faults }}
{{- fail (printf "these values cannot be installed:\n- %s" (join "\n- " .)) }}
{{- end }}
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
  port: webhook.service.port
  path: webhook.path
  secrets: webhookSecrets.existingSecret
  secret_files: webhookSecrets.existingSecret
  shutdown_timeout_seconds: webhook.shutdownTimeoutSeconds
{{- end }}
