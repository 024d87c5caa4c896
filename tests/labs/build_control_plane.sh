#!/usr/bin/env bash
# build_control_plane.sh DIR [VERSION]: builds Kubernetes' servers from its Go modules into DIR.
# It takes Go, etcd, about 12 minutes on two cores the first time, and 5 GB of disk.
set -euo pipefail
dir=${1:?"the folder for the servers, such as ~/kubernetes"} version=${2:-v1.37.2}
servers=(kube-apiserver kube-controller-manager kube-scheduler)
for command in go etcd; do
  command -v "$command" >/dev/null || { echo "the control plane needs $command, which is not installed" >&2; exit 1; }
done
mkdir -p "$dir/src"
cd "$dir"
if [ "$(cat built 2>/dev/null)" = "$version" ]; then exit 0; fi
echo "building Kubernetes $version in $dir; the first time this takes some minutes" >&2
cd src
export GOFLAGS=-mod=mod CGO_ENABLED=0
module=k8s.io/kubernetes
{ printf '//go:build tools\npackage lab\nimport (\n'
  printf "_ \"$module/cmd/%s\"\n" "${servers[@]}"
  printf ')\n'; } >tools.go
printf 'module lab\ngo 1.26.0\n' >go.mod
go mod download "$module@$version"
# Kubernetes' own libraries are placeholders in its go.mod: each is replaced by its release of the
# same number.
{ echo "require $module $version"
  sed -n "s|^\t\(k8s.io/[a-z-]*\) v0.0.0\$|replace \1 => \1 v0.${version#v1.}|p" \
    "$(go env GOMODCACHE)/$module@$version/go.mod"; } >>go.mod
go mod tidy
about=k8s.io/component-base/version minor=$(cut -d. -f2 <<<"$version")
go build -o .. -ldflags "-s -w -X $about.gitVersion=$version -X $about.gitMajor=1 -X $about.gitMinor=$minor" \
  "${servers[@]/#/$module/cmd/}"
cp "$(command -v etcd)" ..
echo "$version" >../built
