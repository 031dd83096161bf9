"""Helm's own engine, in a process of its own: a Go runtime has threads and signal handlers that tests of a server are
better off without.

The process answers one JSON object a line with another: `python -m tests.helm` is its program, `Helm` what tests use.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm" / "headrace"
EXAMPLES = sorted((ROOT / "helm" / "examples").glob("*.yaml"))
RELEASE, NAMESPACE = "headrace", "ai"

Document = dict[str, Any]


class HelmError(Exception):
    """What Helm refused, in its words."""


class Helm:
    """The chart in Helm's hands."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.helm"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, type_: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._process.communicate(timeout=30)

    def files(self, values: Document, release: str = RELEASE, namespace: str = NAMESPACE) -> dict[str, str]:
        """What each template makes of `values`, by its path in the chart. Raises HelmError."""
        rendered: dict[str, str] = self._ask({"render": values, "release": release, "namespace": namespace})
        return {name.removeprefix("headrace/templates/"): text for name, text in rendered.items()}

    def documents(self, values: Document, release: str = RELEASE, namespace: str = NAMESPACE) -> list[Document]:
        """The manifests that `helm install` would send."""
        texts = [text for name, text in self.files(values, release, namespace).items() if name != "NOTES.txt"]
        return [one for text in texts for one in yaml.load_all(text, yaml.CSafeLoader) if one is not None]

    def lint(self, values: Document) -> list[str]:
        """What `helm lint --strict` has against the chart."""
        return [
            f"{one['path']}: {one['error']}" for one in self._ask({"lint": values})["messages"] if one["severity"] > 1
        ]

    def cluster(self, action: str, kubeconfig: Path, namespace: str, **more: Any) -> Document:
        """`helm ACTION` (install, upgrade, rollback, uninstall) in a cluster, with `values` or the `version` to go to;
        gives what Helm tells of the release. Raises HelmError."""
        told: Document = self._ask(
            {"action": action, "kubeconfig": str(kubeconfig), "namespace": namespace, "more": more}
        )
        return told

    def _ask(self, question: Document) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(question) + "\n")
        stdin.flush()
        answer = json.loads(stdout.readline())
        if "refused" in answer:
            raise HelmError(answer["refused"])
        return answer["done"]


def _act(chart: Any, action: str, kubeconfig: str, namespace: str, more: Document) -> Document:
    import helm_python

    with helm_python.Config(kubeconfig_path=kubeconfig, namespace=namespace) as config:
        match action:
            case "install":
                config.install(chart, RELEASE, more["values"], namespace=namespace)
            case "upgrade":
                config.upgrade(chart, RELEASE, more["values"], namespace=namespace)
            case "rollback":
                config.rollback(RELEASE, version=more["version"])
            case "uninstall":
                return dict(config.uninstall(RELEASE))
        return dict(config.status(RELEASE))


def _serve() -> None:
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        for line in sys.stdin:
            question = json.loads(line)
            try:
                if "lint" in question:
                    done: Document = helm_python.lint(CHART, question["lint"], strict=True)
                elif "action" in question:
                    done = _act(chart, **question)
                else:
                    done = chart.render(question["render"], name=question["release"], namespace=question["namespace"])
            except helm_python.HelmError as error:
                answer: Document = {"refused": str(error)}
            else:
                answer = {"done": done}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
