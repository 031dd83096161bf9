{{- /* What starts an engine. Each define takes dict root, name, b (the backend), role (single, leader, worker). */ -}}

{{- define "headrace.vllmArgs" -}}
{{- $t := .b.tuning -}}
- {{ .b.weights | default .b.model | quote }}
- --served-model-name={{ .b.model }}
- --host=0.0.0.0
- --port={{ .b.port }}
- --tensor-parallel-size={{ .b.tensorParallel }}
- --pipeline-parallel-size={{ .b.pipelineParallel }}
{{- if gt (int .b.nodes) 1 }}
- --distributed-executor-backend=ray
{{- end }}
{{- with $t.maxBatchSize }}
- --max-num-seqs={{ . }}
{{- end }}
{{- with $t.maxNumTokens }}
- --max-num-batched-tokens={{ . }}
{{- end }}
{{- with $t.maxSequenceLength }}
- --max-model-len={{ . }}
{{- end }}
{{- if kindIs "bool" $t.chunkedContext }}
- --{{ ternary "" "no-" $t.chunkedContext }}enable-chunked-prefill
{{- end }}
- --{{ ternary "" "no-" $t.kvReuse }}enable-prefix-caching
{{- with $t.kvFraction }}
- --gpu-memory-utilization={{ . }}
{{- end }}
{{- with $t.kvDtype }}
- --kv-cache-dtype={{ . }}
{{- end }}
{{- with $t.quantization }}
- --quantization={{ . }}
{{- end }}
{{- with $t.speculative }}
- {{ printf "--speculative-config=%s" (toJson .) | quote }}
{{- end }}
{{- end -}}

{{- define "headrace.trtllmArgs" -}}
{{- $t := .b.tuning -}}
- {{ .b.weights | default .b.model | quote }}
- --host=0.0.0.0
- --port={{ .b.port }}
- --tp_size={{ .b.tensorParallel }}
- --pp_size={{ .b.pipelineParallel }}
{{- with $t.maxBatchSize }}
- --max_batch_size={{ . }}
{{- end }}
{{- with $t.maxNumTokens }}
- --max_num_tokens={{ . }}
{{- end }}
{{- with $t.maxSequenceLength }}
- --max_seq_len={{ . }}
{{- end }}
- --extra_llm_api_options=/etc/headrace/engine/options.yaml
{{- end -}}

{{- define "headrace.trtllmOptions" -}}
{{- $t := .b.tuning -}}
{{- $kv := dict "enable_block_reuse" $t.kvReuse -}}
{{- with $t.kvFraction }}{{ $_ := set $kv "free_gpu_memory_fraction" . }}{{ end -}}
{{- with $t.kvDtype }}{{ $_ := set $kv "dtype" . }}{{ end -}}
{{- $options := dict "return_perf_metrics" true "kv_cache_config" $kv -}}
{{- if kindIs "bool" $t.chunkedContext }}{{ $_ := set $options "enable_chunked_prefill" $t.chunkedContext }}{{ end -}}
{{- with $t.quantization }}{{ $_ := set $options "quant_config" (dict "quant_algo" (upper .)) }}{{ end -}}
{{- with $t.speculative }}{{ $_ := set $options "speculative_config" . }}{{ end -}}
{{- toYaml (mergeOverwrite $options (deepCopy $t.options)) -}}
{{- end -}}

{{- /* Parameters of the repository's `tensorrt_llm` model, as files/triton.py puts them into its config.pbtxt. */ -}}
{{- define "headrace.tritonParameters" -}}
{{- $t := .b.tuning -}}
{{- $p := dict "batching_strategy" "inflight_fused_batching" "decoupled_mode" true "enable_kv_cache_reuse" $t.kvReuse -}}
{{- with $t.maxBatchSize }}{{ $_ := set $p "triton_max_batch_size" . }}{{ end -}}
{{- if kindIs "bool" $t.chunkedContext }}{{ $_ := set $p "enable_chunked_context" $t.chunkedContext }}{{ end -}}
{{- with $t.kvFraction }}{{ $_ := set $p "kv_cache_free_gpu_mem_fraction" . }}{{ end -}}
{{- with $t.speculative }}{{ $p = merge $p . }}{{ end -}}
{{- toPrettyJson (mergeOverwrite $p (deepCopy $t.options)) -}}
{{- end -}}

{{- define "headrace.engineCommand" -}}
{{- $b := .b -}}
{{- if eq $b.engine "vllm" -}}
{{- if eq .role "single" }}
command: [vllm, serve]
{{- else if eq .role "leader" }}
command: [/bin/sh, -c, 'ray start --head --port=6379 --disable-usage-stats && exec vllm serve "$@"', vllm]
{{- else }}
command: [/bin/sh, -c, 'until ray start --address="$LWS_LEADER_ADDRESS:6379" --disable-usage-stats --block; do sleep 2; done']
{{- end }}
{{- if ne .role "worker" }}
args:
  {{- include "headrace.vllmArgs" . | nindent 2 }}
  {{- with $b.args }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- else if eq $b.engine "trtllm-serve" }}
command: [trtllm-serve]
args:
  {{- include "headrace.trtllmArgs" . | nindent 2 }}
  {{- with $b.args }}{{ toYaml . | nindent 2 }}{{ end }}
{{- else if eq $b.engine "triton" }}
command: [python3, /etc/headrace/engine/triton.py, {{ ternary "worker" "serve" (eq .role "worker") }}]
args:
  - --repository={{ $b.triton.repository }}
  - --ranks={{ mul $b.tensorParallel $b.pipelineParallel }}
  - --nodes={{ $b.nodes }}
  - --exit-timeout={{ sub (int $b.graceSeconds) 20 }}
  - --http-port={{ $b.port }}
  {{- with $b.args }}{{ toYaml . | nindent 2 }}{{ end }}
{{- else }}
{{- with $b.command }}
command: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $b.args }}
args: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Where a replica may run: its capacity type decides between spot nodes and all others. dict root, b, capacity. */ -}}
{{- define "headrace.placement" -}}
{{- $known := dict
  "gke" (dict "key" "cloud.google.com/gke-spot" "value" "true")
  "eks" (dict "key" "eks.amazonaws.com/capacityType" "value" "SPOT")
  "karpenter" (dict "key" "karpenter.sh/capacity-type" "value" "spot")
  "aks" (dict "key" "kubernetes.azure.com/scalesetpriority" "value" "spot") -}}
{{- $provider := .root.Values.spot.provider -}}
{{- $spot := eq .capacity "spot" -}}
{{- $tolerations := .b.tolerations -}}
{{- if .b.gpuResource -}}
{{- $tolerations = append $tolerations (dict "key" .b.gpuResource "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- if $spot -}}
{{- if and (not $provider) (not .root.Values.spot.tolerations) -}}
{{- fail "spot.provider is missing: spotReplicas need to know how spot nodes are told from others (gke, eks, karpenter, aks)" -}}
{{- end -}}
{{- $tolerations = concat $tolerations .root.Values.spot.tolerations -}}
{{- if has $provider (list "gke" "aks") -}}
{{- $label := index $known $provider -}}
{{- $tolerations = append $tolerations (dict "key" $label.key "operator" "Equal" "value" $label.value "effect" "NoSchedule") -}}
{{- end -}}
{{- end -}}
{{- with $tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $affinity := deepCopy .b.affinity -}}
{{- if and $provider (not (hasKey $affinity "nodeAffinity")) -}}
{{- $label := index $known $provider -}}
{{- $match := dict "key" $label.key "operator" (ternary "In" "NotIn" $spot) "values" (list $label.value) -}}
{{- $terms := dict "nodeSelectorTerms" (list (dict "matchExpressions" (list $match))) -}}
{{- $_ := set $affinity "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" $terms) -}}
{{- end -}}
{{- with $affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .b.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .b.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{- /* A pod of an engine: dict root, name, workload, b, role, capacity. */ -}}
{{- define "headrace.enginePod" -}}
{{- $b := .b -}}
{{- $triton := eq $b.engine "triton" -}}
{{- $health := ternary "/v2/health/ready" "/health" $triton -}}
{{- $files := ne $b.engine "openai" -}}
metadata:
  labels:
    {{- include "headrace.labels" (dict "root" .root "component" .workload) | nindent 4 }}
    headrace.dev/backend: {{ .name }}
    headrace.dev/capacity: {{ .capacity }}
  annotations:
    {{- if $files }}
    checksum/engine: {{ include "headrace.engineFiles" . | sha256sum }}
    {{- end }}
    {{- if and (eq $b.engine "vllm") (ne .role "worker") }}
    headrace.dev/metrics-port: http
    {{- end }}
    headrace.dev/tensor-parallel: {{ $b.tensorParallel | quote }}
    headrace.dev/pipeline-parallel: {{ $b.pipelineParallel | quote }}
spec:
  automountServiceAccountToken: false
  {{- with include "headrace.pullSecrets" .root }}{{ . | nindent 2 }}{{ end }}
  securityContext: {{- include "headrace.podSecurity" (dict "user" $b.user) | nindent 4 }}
  terminationGracePeriodSeconds: {{ $b.graceSeconds }}
  {{- with include "headrace.placement" . }}{{ . | indent 2 }}{{ end }}
  containers:
    - name: engine
      image: {{ $b.image | default (index .root.Values.engines $b.engine).image }}
      imagePullPolicy: IfNotPresent
      {{- include "headrace.engineCommand" . | indent 6 }}
      securityContext: {{- include "headrace.containerSecurity" . | nindent 8 }}
      env:
        # The root file system may be the image's, but caches are the user's, whose name the image may not know.
        - {name: HOME, value: /tmp}
        - {name: USER, value: engine}
        - {name: HF_HOME, value: /models/.huggingface}
        {{- with $b.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if ne .role "worker" }}
      # A pod that is deleted is told to stop only when its streams have ended: by then gateways know that it drains.
      lifecycle:
        preStop:
          {{- if has $b.engine (list "vllm" "trtllm-serve") }}
          exec: {command: [python3, /etc/headrace/engine/idle.py, {{ include "headrace.runningMetric" $b }}, "{{ sub (int $b.graceSeconds) 20 }}"]}
          {{- else }}
          exec: {command: [sleep, "5"]}
          {{- end }}
      ports:
        - {name: http, containerPort: {{ $b.port }}}
        {{- if $triton }}
        - {name: grpc, containerPort: 8001}
        - {name: metrics, containerPort: 8002}
        {{- end }}
      # Loading takes as long as the weights are large: until then nothing else is asked.
      startupProbe:
        httpGet: {path: {{ $health }}, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: {{ mul $b.startupMinutes 6 }}
      readinessProbe:
        httpGet: {path: {{ $health }}, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
      livenessProbe:
        httpGet: {path: {{ ternary "/v2/health/live" "/health" $triton }}, port: http}
        periodSeconds: 15
        timeoutSeconds: 10
        failureThreshold: 8
      {{- else if $triton }}
      ports:
        - {name: ssh, containerPort: 2222}
      startupProbe: {tcpSocket: {port: ssh}, periodSeconds: 2, failureThreshold: 60}
      readinessProbe: {tcpSocket: {port: ssh}, periodSeconds: 10}
      livenessProbe: {tcpSocket: {port: ssh}, periodSeconds: 15, failureThreshold: 8}
      {{- else }}
      startupProbe: {exec: {command: [ray, health-check]}, periodSeconds: 10, timeoutSeconds: 10, failureThreshold: {{ mul $b.startupMinutes 6 }}}
      readinessProbe: {exec: {command: [ray, health-check]}, periodSeconds: 30, timeoutSeconds: 10}
      livenessProbe: {exec: {command: [ray, health-check]}, periodSeconds: 30, timeoutSeconds: 10, failureThreshold: 8}
      {{- end }}
      {{- $limits := dict "memory" $b.memory -}}
      {{- if $b.gpuResource }}{{ $_ := set $limits $b.gpuResource (toString (int $b.gpus)) }}{{ end }}
      resources: {{- toYaml (mergeOverwrite (dict "limits" $limits) (deepCopy $b.resources)) | nindent 8 }}
      volumeMounts:
        - {name: models, mountPath: /models}
        - {name: shared-memory, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        {{- if $files }}
        - {name: files, mountPath: /etc/headrace/engine, readOnly: true}
        {{- end }}
        {{- if and $triton (gt (int $b.nodes) 1) }}
        - {name: ssh, mountPath: /etc/headrace/ssh, readOnly: true}
        {{- end }}
  volumes:
    - name: models
      {{- toYaml ($b.volume | default (dict "emptyDir" dict)) | nindent 6 }}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ $b.sharedMemory }}}
    - name: tmp
      emptyDir: {}
    {{- if $files }}
    - name: files
      configMap: {name: {{ include "headrace.fullname" .root }}-{{ .name }}}
    {{- end }}
    {{- if and $triton (gt (int $b.nodes) 1) }}
    - name: ssh
      secret: {secretName: {{ $b.triton.sshSecret }}, defaultMode: 0440}
    {{- end }}
{{- end -}}

{{- /* Where an engine says how many requests it works on: URL and name of the metric, as idle.py takes them. */ -}}
{{- define "headrace.runningMetric" -}}
{{- if eq .engine "vllm" -}}
"http://127.0.0.1:{{ .port }}/metrics", "vllm:num_requests_running"
{{- else -}}
"http://127.0.0.1:{{ .port }}/prometheus/metrics", trtllm_num_requests_running
{{- end -}}
{{- end -}}

{{- /* What is mounted into an engine's pod at /etc/headrace/engine. */ -}}
{{- define "headrace.engineFiles" -}}
{{- if eq .b.engine "triton" }}
parameters.json: | {{- include "headrace.tritonParameters" . | nindent 2 }}
triton.py: | {{- .root.Files.Get "files/triton.py" | nindent 2 }}
{{- else if ne .b.engine "openai" }}
idle.py: | {{- .root.Files.Get "files/idle.py" | nindent 2 }}
{{- if eq .b.engine "trtllm-serve" }}
options.yaml: | {{- include "headrace.trtllmOptions" . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}
