"""Plays the API of Kubernetes, with a scheduler and node controller, so that tests need no cluster.

It treats objects as the real one does in the points that matter: names are taken, uids are new, a
pod's kubelet deletes it after its grace period, selectors choose. Kubelets are those of the test
kit (kubelet.py). It validates no object; a schema does that (kubernetes-validate).

The same cases run against a real control plane (test_kubernetes_jobs.py and
test_kubernetes_coordinators.py; docs/kubernetes.md names the versions). They compare with it:

- names that are taken (409) or missing (404), labels as selectors, merge patches;
- the grace period of deletions, evictions, and that pods go with their Job;
- where pods are scheduled: taints, cordons, anti-affinity, hosts to avoid;
- a Job whose pods are lost without its finalizer, or fail; its conditions Complete and Failed.

These are guesses, by the source of Kubernetes 1.37 or its documents, and no test compares them:

- the growth of a Job's delay after failures (backoff_utils.go), and `status.active` of a Job;
- the moment at which a pod with a finalizer goes;
- 403 for forbidden resources: the text of a real answer is longer.

It knows neither the disruption budget nor quotas, nor the interim conditions FailureTarget and
SuccessCriteriaMet, events, admission or priorities.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from holdfast.clusters.kubernetes.kubernetes_manifests import JOB_UID, TRACKING

Object = dict[str, Any]
Place = tuple[str, str]  # resource, and namespace or ""

ACT_S = 0.02
GRACE_S = 30
BACKOFF_MAX_S = 600.0
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


class Status(Exception):
    """Carries an answer that is no object: its HTTP status and reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code

    def body(self) -> Object:
        text = str(self)
        parts = {"status": "Failure", "message": text, "reason": text, "code": self.code}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, **parts}


class JobCounts:
    """Counts the ends of a Job's pods that have the finalizer, as the controller of Jobs does."""

    def __init__(self) -> None:
        self.succeeded = False
        self.failures = 0
        self._failed_at = float("-inf")

    def count(self, pod: Object) -> bool:
        """Count a pod that has ended, or is being deleted; return whether it has."""
        about, phase = pod["metadata"], pod["status"]["phase"]
        is_over = phase in ("Succeeded", "Failed") or "deletionTimestamp" in about
        if not is_over or TRACKING not in about.get("finalizers", ()):
            return False
        if phase == "Succeeded":
            self.succeeded = True
        else:
            self.failures, self._failed_at = self.failures + 1, time.monotonic()
        return True

    def next_at(self, backoff_s: float) -> float:
        """Return when the next pod may be created: twice as late after each failure."""
        if not self.failures:
            return float("-inf")
        return self._failed_at + min(backoff_s * 2.0 ** (self.failures - 1), BACKOFF_MAX_S)


class FakeKubernetes:
    """Keeps all objects; used as a context manager it serves them at `url`.

    `backoff_s`: how long a Job waits after the first failure of a pod. A real one waits for 10 s.
    `away`: it never answers. A node whose lease is not renewed for `grace_s` is unreachable and
    loses its pods: kubelets may be late while other programs are at work.
    """

    def __init__(self, grace_s: float = 5.0) -> None:
        self.away = threading.Event()
        self.forbidden: set[str] = set()  # resources
        self.backoff_s = 0.1
        self._counts: dict[str, JobCounts] = {}  # by the uids of Jobs
        self._grace_s = grace_s
        self._objects: dict[Place, dict[str, Object]] = {}
        self._lock = threading.RLock()
        self._version = 0
        self._over = threading.Event()
        self._server: ThreadingHTTPServer | None = None

    def __enter__(self) -> FakeKubernetes:
        fake = self

        class Answers(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                _answer(self, fake)

            do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self._server.daemon_threads = True
        for work in (self._server.serve_forever, self._act):
            threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    # ------------------------------------------------------------ requests

    def handle(self, method: str, target: str, body: Object) -> Object:
        """Carry out one request; raise Status with the reason if it is wrong."""
        parts = urlsplit(target)
        asked = {key: values[0] for key, values in parse_qs(parts.query).items()}
        place, name, below = _read_path(parts.path)
        if place[0] in self.forbidden:
            raise Status(403, f"{place[0]} is forbidden")
        with self._lock:
            here = self._objects.setdefault(place, {})
            if method == "POST" and below == "eviction":
                return self._delete(here, name, body.get("deleteOptions") or {})
            if method == "POST" and below == "token":
                return {"status": {"token": name}}
            if method == "POST":
                return self._create(place, here, body)
            if not name:
                listed = here.values() if here or place[1] else self._all(place[0])
                chosen = [each for each in listed if _chosen(each, asked)]
                return {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": chosen}
            if name not in here:
                raise Status(404, f'{place[0]} "{name}" not found')
            if method == "DELETE":
                return self._delete(here, name, {**body, **asked})
            if method in ("PATCH", "PUT"):
                here[name] = self._new(_merged(here[name], body) if method == "PATCH" else body)
            return here[name]

    def _new(self, found: Object) -> Object:
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        return found

    def _create(self, place: Place, here: dict[str, Object], body: Object) -> Object:
        resource, namespace = place
        about = body.setdefault("metadata", {})
        about.setdefault("name", about.get("generateName", "") + uuid.uuid4().hex[:5])
        if about["name"] in here:
            raise Status(409, f'{resource} "{about["name"]}" already exists')
        about.update(uid=str(uuid.uuid4()), creationTimestamp=_stamp())
        if namespace:
            about["namespace"] = namespace
        if resource == "pods":
            body.setdefault("status", {})["phase"] = "Pending"
        here[about["name"]] = self._new(body)
        return body

    def _delete(self, here: dict[str, Object], name: str, how: Object) -> Object:
        """Delete at once, or have a pod's kubelet end it first."""
        found = here[name]
        wanted_s = how.get("gracePeriodSeconds")
        if "nodeName" in found.get("spec", {}) and found["status"]["phase"] in (
            *("Pending", "Running"),
        ):
            default_s = found["spec"].get("terminationGracePeriodSeconds", GRACE_S)
            grace_s = default_s if wanted_s is None else int(wanted_s)
            if grace_s > 0:
                about, until = found["metadata"], _stamp(grace_s)
                if until < about.get("deletionTimestamp", "9"):  # it never gets later
                    about.update(deletionTimestamp=until, deletionGracePeriodSeconds=grace_s)
                return self._new(found)
        if found["metadata"].get("finalizers"):  # it goes once they are removed
            found["metadata"].setdefault("deletionTimestamp", _stamp())
            found["metadata"]["deletionGracePeriodSeconds"] = 0
            return self._new(found)
        gone = here.pop(name)
        if gone.get("kind") == "Job" and (how.get("propagationPolicy") or "Orphan") == "Orphan":
            self._orphan(gone["metadata"]["uid"])
        return gone

    def _orphan(self, uid: str) -> None:
        """Keep the objects of a Job that is deleted without them, as the API does by default."""
        for each in (*self._all("pods"), *self._all("configmaps")):
            about = each["metadata"]
            if about.get("labels", {}).get(JOB_UID) == uid:
                del about["labels"][JOB_UID]
            owners = about.get("ownerReferences", ())
            about["ownerReferences"] = [owner for owner in owners if owner["uid"] != uid]

    # ------------------------------------------------------------ controllers

    def _act(self) -> None:
        while not self._over.wait(ACT_S):
            if not self.away.is_set():
                with self._lock:
                    self._watch_nodes()
                    self._schedule()
                    self._evict()
                    self._run_jobs()
                    self._collect()

    def _all(self, resource: str) -> Iterator[Object]:
        for (each, _), found in list(self._objects.items()):
            if each == resource:
                yield from list(found.values())

    def _watch_nodes(self) -> None:
        leases = self._objects.get(("leases", "kube-node-lease"), {})
        for node in self._all("nodes"):
            lease = leases.get(node["metadata"]["name"])
            if lease is None:
                continue
            age_s = time.time() - _moment(lease["spec"]["renewTime"])
            taints = node["spec"].setdefault("taints", [])
            key = "node.kubernetes.io/unreachable"
            known = [taint for taint in taints if taint["key"] == key]
            if age_s > self._grace_s and not known:
                for effect in ("NoSchedule", "NoExecute"):
                    taints.append({"key": key, "effect": effect, "timeAdded": _stamp()})
            elif age_s <= self._grace_s and known:
                node["spec"]["taints"] = [taint for taint in taints if taint not in known]

    def _schedule(self) -> None:
        pods = list(self._all("pods"))
        nodes = sorted(self._all("nodes"), key=lambda node: str(node["metadata"]["name"]))
        for pod in pods:
            if "nodeName" not in pod["spec"]:
                fits = [node for node in nodes if _fits(pod, node, pods)]
                if fits:
                    pod["spec"]["nodeName"] = fits[0]["metadata"]["name"]
                    self._new(pod)

    def _evict(self) -> None:
        nodes = {node["metadata"]["name"]: node for node in self._all("nodes")}
        for pod in self._all("pods"):
            node = nodes.get(pod["spec"].get("nodeName"), {"spec": {}})
            deleted = "deletionTimestamp" in pod["metadata"]
            for taint in node["spec"].get("taints", ()):
                bearable = [t for t in pod["spec"].get("tolerations", ()) if _tolerates(t, taint)]
                limits = [each.get("tolerationSeconds") for each in bearable]
                if taint["effect"] != "NoExecute" or None in limits or deleted:
                    continue
                since = _moment(taint.get("timeAdded", _stamp()))
                if time.time() >= since + min(limits, default=0):
                    about = pod["metadata"]
                    self._delete(self._objects["pods", about["namespace"]], about["name"], {})
                    deleted = True

    def _collect(self) -> None:
        """Delete the objects whose owners are gone: ConfigMaps and pods."""
        jobs = {job["metadata"]["uid"] for job in self._all("jobs")}
        for each in list(self._all("configmaps")):
            if _owners(each) and not _owners(each) & jobs:
                about = each["metadata"]
                self._objects["configmaps", about["namespace"]].pop(about["name"])
        left = jobs | {each["metadata"]["uid"] for each in self._all("configmaps")}
        for pod in list(self._all("pods")):
            about, owners = pod["metadata"], _owners(pod)
            owners |= {about["labels"][JOB_UID]} if JOB_UID in about.get("labels", {}) else set()
            here = self._objects["pods", about["namespace"]]
            if owners and not owners & left:
                about["finalizers"] = []
                if "deletionTimestamp" not in about:
                    self._delete(here, about["name"], {})
            if about.get("deletionGracePeriodSeconds") == 0 and not about.get("finalizers"):
                here.pop(about["name"], None)

    def _run_jobs(self) -> None:
        for job in self._all("jobs"):
            about, spec = job["metadata"], job["spec"]
            here = self._objects.setdefault(("pods", about["namespace"]), {})
            mine = [p for p in here.values() if _is_pod_of(p, about["uid"])]
            counts = self._counts.setdefault(about["uid"], JobCounts())
            for pod in mine:
                if counts.count(pod):
                    pod["metadata"]["finalizers"].remove(TRACKING)
            going = [p for p in mine if "deletionTimestamp" not in p["metadata"]]
            alive = [p for p in going if p["status"]["phase"] in ("Pending", "Running")]
            failed = counts.failures > spec["backoffLimit"]
            if counts.succeeded or failed:
                done = "Complete" if counts.succeeded else "Failed"
                job["status"] = {"conditions": [{"type": done, "status": "True"}]}
                continue
            job["status"] = {"active": len(alive)} if alive else {}
            due = time.monotonic() >= counts.next_at(self.backoff_s)
            if not alive and due and spec.get("parallelism", 1):
                pod = json.loads(json.dumps(spec["template"]))
                pod["metadata"].update(generateName=f"{about['name']}-", finalizers=[TRACKING])
                pod["metadata"].setdefault("labels", {})[JOB_UID] = about["uid"]
                self._create(("pods", about["namespace"]), here, pod)


def _owners(found: Object) -> set[str]:
    return {each["uid"] for each in found["metadata"].get("ownerReferences", ())}


def _is_pod_of(pod: Object, uid: str) -> bool:
    return bool(pod["metadata"].get("labels", {}).get(JOB_UID) == uid)


def _answer(request: BaseHTTPRequestHandler, fake: FakeKubernetes) -> None:
    length = int(request.headers.get("Content-Length") or 0)
    text = request.rfile.read(length)
    if fake.away.is_set():
        request.close_connection = True
        return
    try:
        code, found = 200, fake.handle(request.command, request.path, json.loads(text or b"{}"))
    except Status as status:
        code, found = status.code, status.body()
    data = json.dumps(found).encode()
    with contextlib.suppress(ConnectionError):
        request.send_response(code)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)


def _read_path(path: str) -> tuple[Place, str, str]:
    """Return resource and namespace, the object's name, and the rest of the path."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if parts[0] == "namespaces" and len(parts) > 2:
        namespace, parts = parts[1], parts[2:]
    name, below = [*parts[1:], "", ""][:2]
    return (parts[0], namespace), name, below


def _chosen(found: Object, asked: dict[str, str]) -> bool:
    labels = found["metadata"].get("labels", {})
    for each in filter(None, asked.get("labelSelector", "").split(",")):
        key, _, value = each.replace("==", "=").partition("=")
        if labels.get(key) != value:
            return False
    for each in filter(None, asked.get("fieldSelector", "").split(",")):
        key, _, value = each.replace("==", "=").partition("=")
        part: Any = found
        for word in key.split("."):
            part = part.get(word, "")
        if part != value:
            return False
    return True


def _merged(old: Any, new: Any) -> Any:
    """Apply a JSON merge patch."""
    if not isinstance(new, dict) or not isinstance(old, dict):
        return new
    merged = {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return {key: value for key, value in merged.items() if value is not None}


def _fits(pod: Object, node: Object, pods: list[Object]) -> bool:
    spec, name = pod["spec"], node["metadata"]["name"]
    tolerations = spec.get("tolerations", ())
    if node["spec"].get("unschedulable"):
        return False
    for taint in node["spec"].get("taints", ()):
        if not any(_tolerates(each, taint) for each in tolerations):
            return False
    affinity = spec.get("affinity", {})
    terms = affinity.get("nodeAffinity", {}).get(REQUIRED, {}).get("nodeSelectorTerms", ())
    for field in (f for term in terms for f in term.get("matchFields", ())):
        if name in field["values"]:  # no other operator than NotIn is used here
            return False
    there = [p for p in pods if p["spec"].get("nodeName") == name]
    there = [p for p in there if p["status"]["phase"] in ("Pending", "Running")]
    for term in affinity.get("podAntiAffinity", {}).get(REQUIRED, ()):
        chosen = term["labelSelector"]["matchLabels"].items()
        if any(chosen <= p["metadata"].get("labels", {}).items() for p in there):
            return False
    return True


def _tolerates(toleration: Object, taint: Object) -> bool:
    same = toleration.get("value", "") == taint.get("value", "")
    return (
        toleration.get("effect", taint["effect"]) == taint["effect"]
        and toleration.get("key", taint["key"]) == taint["key"]
        and (toleration.get("operator") == "Exists" or same)
    )


def _stamp(later_s: float = 0.0) -> str:
    moment = datetime.now(timezone.utc) + timedelta(seconds=later_s)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _moment(stamp: str) -> float:
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
