{{/*
Lists of queues, exchanges and bindings. Names and arguments are those that the bridge would declare
(bridge/topology/declarations.py), so that it finds no difference. `object` of a binding becomes part
of the name of its Kubernetes object. Bindings of subscribers come last.
*/}}
{{- define "sms-bridge.topology" -}}
{{- $queues := list }}{{ $exchanges := list }}{{ $bindings := list }}
{{- if .Values.worker.enabled }}
{{- $main := (include "sms-bridge.setting" (list . "worker" "queue") | fromJson).value }}
{{- $requests := include "sms-bridge.requestQueues" . | fromJsonArray }}
{{- range $requests }}{{ $queues = append $queues (dict "name" .) }}{{ end }}
{{- range $queue := $requests }}
{{- range (include "sms-bridge.setting" (list $ "worker" "retry_delays") | fromJson).value }}
{{- $seconds := include "sms-bridge.seconds" . | float64 }}
{{- $arguments := dict
  "x-message-ttl" (round (mulf $seconds 1000) 0 | int64)
  "x-dead-letter-exchange" ""
  "x-dead-letter-routing-key" $queue
  "x-dead-letter-strategy" "at-least-once"
  "x-overflow" "reject-publish" }}
{{- $queues = append $queues (dict "name" (printf "%s.retry.%s" $queue (include "sms-bridge.duration" $seconds)) "arguments" $arguments) }}
{{- end }}
{{- end }}
{{- $queues = append $queues (dict "name" (printf "%s.dead" $main)) }}
{{- with (include "sms-bridge.setting" (list . "worker" "outcome_exchange") | fromJson).value }}
{{- $exchanges = append $exchanges (dict "name" .) }}
{{- end }}
{{- end }}
{{- if .Values.webhook.enabled }}
{{- $exchange := (include "sms-bridge.setting" (list . "webhook" "exchange") | fromJson).value }}
{{- $exchanges = append $exchanges (dict "name" $exchange) }}
{{- with include "sms-bridge.receiptExchange" . }}{{ $exchanges = append $exchanges (dict "name" .) }}{{ end }}
{{- with (include "sms-bridge.setting" (list . "webhook" "queue") | fromJson).value }}
{{- $queues = append $queues (dict "name" .) }}
{{- $bindings = append $bindings (dict "object" . "source" $exchange "destination" . "destinationType" "queue" "routingKey" "#") }}
{{- end }}
{{- range .Values.topology.extraBindings }}
{{- $binding := merge (dict "source" $exchange) . (dict "destinationType" "queue") }}
{{- /* A destination may have several bindings. */}}
{{- $_ := set $binding "object" (printf "%s-%s" .destination (toJson $binding | sha256sum | trunc 8)) }}
{{- $bindings = append $bindings $binding }}
{{- end }}
{{- end }}
{{- dict "queues" $queues "exchanges" (uniq $exchanges) "bindings" $bindings | toJson }}
{{- end }}

{{/*
The exchange to which the webhook receiver publishes delivery outcomes. Empty without
worker.outcome_exchange, or if no endpoint reads receipts: only the preset generic has none, unless
an endpoint describes them.
*/}}
{{- define "sms-bridge.receiptExchange" -}}
{{- $own := .Values.config.webhook | default dict }}
{{- $has := false }}
{{- $configs := concat (list $own) ($own.endpoints | default list) }}
{{- range include "sms-bridge.endpoints" . | fromJsonArray }}{{ $configs = append $configs .config }}{{ end }}
{{- range $config := $configs }}
{{- if ne ($config.preset | default "generic") "generic" }}{{ $has = true }}{{ end }}
{{- if ($config.receipts | default dict).status_pointers }}{{ $has = true }}{{ end }}
{{- end }}
{{- with (include "sms-bridge.setting" (list . "worker" "outcome_exchange") | fromJson).value }}
{{- if $has }}{{ . }}{{ end }}
{{- end }}
{{- end }}

{{/* A pattern that matches exactly these names. `a.*` matches `a` and names that begin with `a.`. */}}
{{- define "sms-bridge.namesPattern" -}}
{{- $escaped := list }}
{{- range . }}
{{- $escaped = append $escaped (regexReplaceAll `\\.\\\*$` (regexQuoteMeta .) `(\..+)?`) }}
{{- end }}
{{- $escaped | join "|" | printf "^(%s)$" }}
{{- end }}

{{/*
The fewest permissions that the bridge needs. With `declare`, it may create its own queues and
exchanges. Only operators' commands read retries and dead letters, and `sms-bridge pause` declares a
queue. Workers always declare their exchange and its queues themselves.
*/}}
{{- define "sms-bridge.permissions" -}}
{{- $t := include "sms-bridge.topology" . | fromJson }}
{{- $read := list }}{{ $write := list }}{{ $configure := list }}
{{- if .Values.worker.enabled }}
{{- $main := (include "sms-bridge.setting" (list . "worker" "queue") | fromJson).value }}
{{- $requests := include "sms-bridge.requestQueues" . | fromJsonArray }}
{{- $read = concat $read $requests }}
{{- $read = append $read (printf "%s.dead" $main) }}
{{- $read = append $read (printf "%s.paused" $main) }}
{{- range $queue := $t.queues }}
{{- range $requests }}{{ if hasPrefix (printf "%s.retry." .) $queue.name }}{{ $read = append $read $queue.name }}{{ end }}{{ end }}
{{- end }}
{{- $configure = append $configure (printf "%s.paused" $main) }}
{{- if eq (include "sms-bridge.setting" (list . "worker" "ordering") | fromJson).value "recipient" }}
{{- $configure = append $configure (printf "%s.active" $main) }}
{{- end }}
{{- /* Permissions call the default exchange, which receives retries and dead letters, amq.default. */}}
{{- $write = append $write "amq.default" }}
{{- if eq (include "sms-bridge.setting" (list . "worker" "coordination") | fromJson).value "on" }}
{{- $workers := printf "%s.workers.*" $main }}
{{- $configure = append $configure $workers }}
{{- $write = append $write $workers }}{{ $read = append $read $workers }}
{{- end }}
{{- end }}
{{- range $t.exchanges }}{{ $write = append $write .name }}{{ end }}
{{- if eq (include "sms-bridge.setting" (list . "rabbitmq" "topology") | fromJson).value "declare" }}
{{- range concat $t.queues $t.exchanges }}{{ $configure = append $configure .name }}{{ end }}
{{- /* A binding needs write on the queue and read on the exchange. Dead-lettering needs read on the queue. */}}
{{- range $t.queues }}{{ $read = append $read .name }}{{ $write = append $write .name }}{{ end }}
{{- range $t.exchanges }}{{ $read = append $read .name }}{{ end }}
{{- end }}
configure: {{ ternary (include "sms-bridge.namesPattern" $configure) "^$" (not (empty $configure)) | quote }}
write: {{ include "sms-bridge.namesPattern" (uniq $write) | quote }}
read: {{ ternary (include "sms-bridge.namesPattern" (uniq $read)) "^$" (not (empty $read)) | quote }}
{{- end }}
