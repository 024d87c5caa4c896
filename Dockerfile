# Holdfast for the pods of `holdfast launch k8s` (docs/kubernetes.md). Build it in a clone:
#
#   docker build -t registry/team/holdfast:7 .
#
# --build-arg BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime
#     another base: Python 3.10 or newer with its module venv. If it has torch, that one stays;
#     otherwise the torch of constraints.txt is installed
# --build-arg EXTRAS=kubernetes,objects,gpu
#     other extras of pyproject.toml; a pod needs `kubernetes`
# --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
#     the small CPU build of torch. PIP_INDEX_URL, PIP_NO_INDEX and PIP_FIND_LINKS work as well
#
# Your own script comes in an image made from this one: FROM registry/team/holdfast:7, then
# COPY train.py /workspace/
ARG BASE=python:3.11-slim

FROM ${BASE} AS wheel
# pip reads these from its environment.
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
ARG PIP_NO_INDEX=
ARG PIP_FIND_LINKS=
COPY LICENSE README.md pyproject.toml /source/
COPY src /source/src
RUN python3 -m venv /build \
 && /build/bin/python -m pip --disable-pip-version-check wheel -q --no-deps -w /wheel /source

FROM ${BASE}
ARG EXTRAS=kubernetes,objects
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
ARG PIP_NO_INDEX=
ARG PIP_FIND_LINKS=
COPY constraints.txt /opt/holdfast/
COPY --from=wheel /wheel /opt/holdfast/wheel
# The environment sees the base's packages. `python3` means it in pods, too.
RUN cd /opt/holdfast && python3 -m venv --system-site-packages . \
 && if python3 -c 'import sys, importlib.util as i; sys.exit(i.find_spec("torch") is None)'; \
    then sed -i '/^torch==/d' constraints.txt; fi \
 && bin/python -m pip --disable-pip-version-check install -q --no-cache-dir -c constraints.txt \
    "$(echo wheel/holdfast-*.whl)[${EXTRAS}]" \
 && rm -r wheel && mkdir -p /workspace && chown 1000:1000 /workspace
# A number, because Kubernetes' runAsNonRoot does not look up names. Some bases have a user 1000.
RUN getent passwd 1000 > /dev/null || useradd --uid 1000 --create-home holdfast
ENV PATH=/opt/holdfast/bin:${PATH} PYTHONUNBUFFERED=1
WORKDIR /workspace
USER 1000:1000
CMD ["holdfast", "--help"]
