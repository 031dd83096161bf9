{{- /* Names. A StatefulSet's must leave room for "-spot" and a revision in labels of 63 characters. */ -}}
{{- define "headrace.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-headrace" .Release.Name) (contains "headrace" .Release.Name) -}}
{{- $name | trunc 26 | trimSuffix "-" -}}
{{- end -}}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "headrace.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- /* Whole seconds of a duration of the fleet file, rounded up. */ -}}
{{- define "headrace.seconds" -}}
{{- if hasSuffix "ms" . -}}{{ divf (float64 (trimSuffix "ms" .)) 1000 | ceil }}
{{- else if hasSuffix "s" . -}}{{ float64 (trimSuffix "s" .) | ceil }}
{{- else if hasSuffix "m" . -}}{{ mulf (float64 (trimSuffix "m" .)) 60 | ceil }}
{{- else -}}{{ mulf (float64 (trimSuffix "h" .)) 3600 | ceil }}
{{- end -}}
{{- end -}}

{{- /* The restricted profile of Pod Security, of a pod and of a container. */ -}}
{{- define "headrace.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
fsGroup: {{ .user }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "headrace.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "headrace.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Whether the gateways have a Redis: bundled, external or "". */ -}}
{{- define "headrace.redis" -}}
{{- if or .Values.redis.url .Values.redis.urlSecret -}}external
{{- else if .Values.redis.bundled -}}bundled
{{- end -}}
{{- end -}}

{{- /* Whether there is something to discover, and a Redis to tell gateways of it. */ -}}
{{- define "headrace.discovery" -}}
{{- $wanted := ternary "yes" "" (gt (len .Values.backends) 0) -}}
{{- range .Values.fleet.pools }}{{ if .discover }}{{ $wanted = "yes" }}{{ end }}{{ end -}}
{{- if and .Values.discovery.enabled (include "headrace.redis" .) -}}{{ $wanted }}{{- end -}}
{{- end -}}

{{- /* How a process gets to Redis: its variables. */ -}}
{{- define "headrace.redisEnv" -}}
{{- $name := include "headrace.fullname" . -}}
{{- if eq (include "headrace.redis" .) "bundled" -}}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ $name }}-redis, key: password}}
- {name: HEADRACE_REDIS_URL, value: "redis://:$(REDIS_PASSWORD)@{{ $name }}-redis:6379"}
{{- else if .Values.redis.urlSecret -}}
- name: HEADRACE_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.urlSecret }}, key: url}}
{{- else if .Values.redis.url -}}
- {name: HEADRACE_REDIS_URL, value: {{ .Values.redis.url | quote }}}
{{- end -}}
{{- end -}}

{{- /* Whether a kind of a CRD is wanted: dict root, wanted (auto, always, never) and api. */ -}}
{{- define "headrace.wanted" -}}
{{- if or (eq .wanted "always") (and (eq .wanted "auto") (.root.Capabilities.APIVersions.Has .api)) -}}yes{{- end -}}
{{- end -}}

{{- /* A backend with its defaults, as YAML: dict root, name. */ -}}
{{- define "headrace.backend" -}}
{{- $b := mergeOverwrite (deepCopy .root.Values.backendDefaults) (deepCopy (index .root.Values.backends .name)) -}}
{{- $world := mul $b.tensorParallel $b.pipelineParallel -}}
{{- if mod $world $b.nodes -}}
{{- fail (printf "backends.%s: tensorParallel x pipelineParallel, %d GPUs, cannot be shared by %d nodes" .name $world (int $b.nodes)) -}}
{{- end -}}
{{- if and (gt (int $b.nodes) 1) (not (has $b.engine (list "vllm" "triton"))) -}}
{{- fail (printf "backends.%s: engine %s cannot have nodes > 1 here; vllm and triton can" .name $b.engine) -}}
{{- end -}}
{{- if not $b.model -}}{{- fail (printf "backends.%s.model is missing: the model's name at the engine" .name) -}}{{- end -}}
{{- if and (eq $b.engine "triton") (not $b.triton.repository) -}}
{{- fail (printf "backends.%s.triton.repository is missing: the model repository's path in the volume, like /models/repository" .name) -}}
{{- end -}}
{{- if and (eq $b.engine "triton") (gt (int $b.nodes) 1) (not $b.triton.sshSecret) -}}
{{- fail (printf "backends.%s.triton.sshSecret is missing: with nodes > 1 mpirun reaches the other pods by ssh" .name) -}}
{{- end -}}
{{- if not (or $b.image (index .root.Values.engines $b.engine)) -}}
{{- fail (printf "backends.%s.image is missing: there is none for engine %s" .name $b.engine) -}}
{{- end -}}
{{- $_ := set $b "gpus" (ternary (div $world $b.nodes) 0 (ne $b.gpuResource "")) -}}
{{- toYaml $b -}}
{{- end -}}

{{- /* The fleet file, as YAML. */ -}}
{{- define "headrace.fleet" -}}
{{- $root := . -}}
{{- $fleet := deepCopy .Values.fleet -}}
{{- $pools := $fleet.pools | default dict -}}
{{- $routes := $fleet.routes | default dict -}}
{{- $used := list -}}
{{- range $route := $routes }}
{{- $used = concat $used (list $route.pool) ($route.fallback | default list) -}}
{{- range $route.pools }}{{ $used = append $used .pool }}{{ end -}}
{{- end -}}
{{- range $name, $_ := .Values.backends -}}
{{- $b := include "headrace.backend" (dict "root" $root "name" $name) | fromYaml -}}
{{- if hasKey $pools $name -}}{{- fail (printf "fleet.pools.%s: backends.%s makes the pool of that name" $name $name) -}}{{- end -}}
{{- $protocol := ternary "triton" "openai" (eq $b.engine "triton") -}}
{{- $pool := dict "protocol" $protocol "model" $b.model -}}
{{- if include "headrace.discovery" $root -}}
{{- /* The workers of a group are to be found, too. */ -}}
{{- $selector := printf "app.kubernetes.io/instance=%s,headrace.dev/backend=%s" $root.Release.Name $name -}}
{{- $_ := set $pool "discover" (dict "selector" $selector) -}}
{{- else -}}
{{- $endpoints := list -}}
{{- range $capacity, $replicas := dict "on-demand" $b.replicas "spot" $b.spotReplicas -}}
{{- $workload := ternary $name (printf "%s-spot" $name) (eq $capacity "on-demand") -}}
{{- range $i := until (int $replicas) -}}
{{- $service := printf "%s-%s" (include "headrace.fullname" $root) $workload -}}
{{- $host := printf "%s-%d.%s.%s.svc" $service $i $service $root.Release.Namespace -}}
{{- $endpoint := dict "id" (printf "%s-%d" $workload $i) "capacity" $capacity -}}
{{- if ne $capacity "spot" }}{{ $endpoint = omit $endpoint "capacity" }}{{ end -}}
{{- $_ := set $endpoint "http" (printf "http://%s:%d" $host (int $b.port)) -}}
{{- if eq $b.engine "triton" -}}
{{- $_ := set $endpoint "grpc" (printf "%s:8001" $host) -}}
{{- $_ := set $endpoint "metrics" (printf "http://%s:8002/metrics" $host) -}}
{{- else if eq $b.engine "vllm" -}}
{{- $_ := set $endpoint "metrics" (printf "http://%s:%d/metrics" $host (int $b.port)) -}}
{{- else if eq $b.engine "trtllm-serve" -}}
{{- $_ := set $endpoint "metrics" (printf "http://%s:%d/prometheus/metrics" $host (int $b.port)) -}}
{{- end -}}
{{- range $field, $value := dict "tp" $b.tensorParallel "pp" $b.pipelineParallel "nodes" $b.nodes -}}
{{- if gt (int $value) 1 }}{{ $_ := set $endpoint $field $value }}{{ end -}}
{{- end -}}
{{- $endpoints = append $endpoints $endpoint -}}
{{- end -}}
{{- end -}}
{{- $_ := set $pool "endpoints" $endpoints -}}
{{- end -}}
{{- $_ := set $pools $name (merge $pool $b.pool) -}}
{{- if not (or (has $name $used) (hasKey $routes $name)) -}}
{{- $_ := set $routes $name (dict "pool" $name) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $fleet "fleet" ($fleet.fleet | default (include "headrace.fullname" .)) -}}
{{- if $pools }}{{ $_ := set $fleet "pools" $pools }}{{ end -}}
{{- if $routes }}{{ $_ := set $fleet "routes" $routes }}{{ end -}}
{{- if and .Values.tenantsSecret $fleet.tenants -}}
{{- fail "fleet.tenants and tenantsSecret both say who may call; keep one" -}}
{{- end -}}
{{- if .Values.gateway.tlsSecret -}}
{{- $tls := dict "cert" "/etc/headrace/tls/tls.crt" "key" "/etc/headrace/tls/tls.key" -}}
{{- $_ := set $fleet "gateway" (merge (dict "tls" $tls) ($fleet.gateway | default dict)) -}}
{{- end -}}
{{- toYaml $fleet -}}
{{- end -}}
