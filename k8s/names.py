"""Labels, annotations and taints that discovery reads, all of them and with what each means to it.

Those under `headrace.dev/` are ours: whoever writes a workload may set them on the pod template, as a label or as an
annotation, the annotation wins. The others belong to Kubernetes, to LeaderWorkerSet and to the clouds, and nobody has
to set them by hand. `docs/kubernetes.md` shows the same tables to users, and a test holds every name to be there.
"""

from typing import Final

# --- what a pod says of itself ---------------------------------------------------------------------------------------

HTTP_PORT: Final = "headrace.dev/http-port"
"""Number, or name of a container's port, of the engine's HTTP API."""
GRPC_PORT: Final = "headrace.dev/grpc-port"
"""The same of its gRPC API (protocol `triton`)."""
METRICS_PORT: Final = "headrace.dev/metrics-port"
"""The same of its Prometheus metrics, under `/metrics`."""
PROTOCOL: Final = "headrace.dev/protocol"
"""What it speaks; a pod that says another protocol than its pool's is left out."""
MODEL: Final = "headrace.dev/model"
"""The model it serves; a pod that says another model than its pool's is left out."""
ROLE: Final = "headrace.dev/role"
"""`prefill`, `decode` or `both`."""
LLM_D_ROLE: Final = "llm-d.ai/role"
"""The same in llm-d's workloads."""
TENSOR_PARALLEL: Final = "headrace.dev/tensor-parallel"
PIPELINE_PARALLEL: Final = "headrace.dev/pipeline-parallel"
"""Sizes of the engine's parallelism."""

OF_PODS: Final = (
    HTTP_PORT, GRPC_PORT, METRICS_PORT, PROTOCOL, MODEL, ROLE, LLM_D_ROLE, TENSOR_PARALLEL, PIPELINE_PARALLEL,
)  # fmt: skip

# --- LeaderWorkerSet (its API leaderworkerset/v1) ---------------------------------------------------------------------

LWS_NAME: Final = "leaderworkerset.sigs.k8s.io/name"
LWS_GROUP: Final = "leaderworkerset.sigs.k8s.io/group-index"
LWS_WORKER: Final = "leaderworkerset.sigs.k8s.io/worker-index"
"""Labels of each pod of a group; the leader's worker index is 0."""
LWS_SIZE: Final = "leaderworkerset.sigs.k8s.io/size"
"""Annotation: how many pods a group has, the leader included."""

OF_GROUPS: Final = (LWS_NAME, LWS_GROUP, LWS_WORKER, LWS_SIZE)

# --- nodes -----------------------------------------------------------------------------------------------------------

SPOT_LABELS: Final = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "spot",
    "cloud.google.com/gke-spot": "true",
    "cloud.google.com/gke-preemptible": "true",
    "cloud.google.com/gke-provisioning": "spot",
    "kubernetes.azure.com/scalesetpriority": "spot",
    "node.kubernetes.io/lifecycle": "spot",
}
"""Labels that make a node a spot one, with their value (in any case)."""
ZONE_LABELS: Final = ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone")
INSTANCE_TYPE_LABELS: Final = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
GPU_LABELS: Final = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "eks.amazonaws.com/instance-gpu-name",
)
"""The first that a node has counts."""

PREEMPTION_TAINTS: Final = frozenset({
    "aws-node-termination-handler/spot-itn",
    "cloud.google.com/impending-node-termination",
})  # fmt: skip
"""The node is about to be taken away."""
DISRUPTION_TAINTS: Final = frozenset({
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "remediator.kubernetes.azure.com/unschedulable",
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
})  # fmt: skip
"""The node is about to end or has failed: on a spot node most likely because it is taken away."""
DRAIN_TAINTS: Final = frozenset({
    "ToBeDeletedByClusterAutoscaler",
    "aws-node-termination-handler/rebalance-recommendation",
    "aws-node-termination-handler/scheduled-maintenance",
    "aws-node-termination-handler/asg-lifecycle-termination",
    "node.kubernetes.io/out-of-service",
})  # fmt: skip
"""Somebody wants the node to be empty soon."""
PREEMPTION_REASONS: Final = frozenset({"TerminationByKubelet", "PreemptionByScheduler"})
"""Of a pod's condition `DisruptionTarget`: the pod does not get the time that it asks for. The kubelet's is a node that
shuts down, which is how GKE takes spot nodes away."""
