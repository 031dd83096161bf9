"""Tests on a real Kubernetes API server: `make test-kube`. Elsewhere they are skipped and say so."""
