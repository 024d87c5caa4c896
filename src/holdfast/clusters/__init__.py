"""Offers the cluster managers that a job can run on: each its adapter, launcher and place."""

from __future__ import annotations

from holdfast.engine.plugins import Manager, Plugin

PLUGIN = Plugin(
    managers={
        "slurm": Manager(
            name="Slurm",
            adapter="holdfast.clusters.slurm.slurm_manager",
            launcher="holdfast.clusters.slurm.slurm_manager",
            text="a batch job of Slurm, and further ones as it grows",
        ),
        "ray": Manager(
            name="Ray",
            adapter="holdfast.clusters.ray.ray_manager",
            launcher="holdfast.clusters.ray.ray_manager",
            text="nodes of a Ray cluster, by an actor on each",
        ),
        "yarn": Manager(
            name="YARN",
            adapter="holdfast.clusters.yarn.yarn_manager",
            launcher="holdfast.clusters.yarn.launch_yarn",
            text="containers of a service on a Hadoop cluster",
        ),
        "mesos": Manager(
            name="Mesos",
            adapter="holdfast.clusters.mesos.mesos_manager",
            launcher="holdfast.clusters.mesos.mesos_manager",
            text="tasks of a framework on a Mesos cluster",
        ),
        "local": Manager(
            name="local",
            adapter="holdfast.clusters.local.local_manager",
            launcher="holdfast.clusters.local.local_manager",
            text="processes of this machine that stand for nodes, to try things out",
        ),
        "kubernetes": Manager(
            name="Kubernetes",
            word="k8s",
            adapter="holdfast.clusters.kubernetes.kubernetes_manager",
            launcher="holdfast.clusters.kubernetes.launch_k8s",
            text="pods of Kubernetes: writes the manifests, or applies them",
        ),
        "fake": Manager(name="fake", adapter="holdfast.clusters.local.fake_cluster"),
    },
)
