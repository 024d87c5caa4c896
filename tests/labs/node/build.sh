#!/usr/bin/env bash
# build.sh DIR [VERSION]: builds into DIR, from their Go modules, what a node of Kubernetes consists
# of: a kubelet, containerd, CoreDNS for the names of services, and the two small programs of this
# folder. It takes Go, about 10 minutes on two cores the first time, and 4 GB of disk.
set -euo pipefail
dir=${1:?"the folder for the programs, such as ~/node"} version=${2:-v1.37.2}
containerd=github.com/containerd/containerd/v2 containerd_version=v2.4.2
coredns=github.com/coredns/coredns coredns_version=v1.15.0
dbus=github.com/godbus/dbus/v5 dbus_version=v5.2.4
here=$(cd "$(dirname "$0")" && pwd)
command -v go >/dev/null || { echo "a node needs go, which is not installed" >&2; exit 1; }
mkdir -p "$dir/src/"{kubelet,containerd,coredns,logind,pause}
cd "$dir"
dir=$PWD
all="$version $containerd_version $coredns_version $dbus_version"
if [ "$(cat built 2>/dev/null)" = "$all" ]; then exit 0; fi
echo "building the programs of a node in $dir; the first time this takes some minutes" >&2
export GOFLAGS=-mod=mod CGO_ENABLED=0

# begin NAME: the module of a program begins in a folder of its own.
begin() {
  cd "$dir/src/$1"
  printf 'module lab\ngo 1.26.0\n' >go.mod
}

begin kubelet
module=k8s.io/kubernetes
printf '//go:build tools\npackage lab\nimport _ "%s/cmd/kubelet"\n' "$module" >tools.go
go mod download "$module@$version"
# Kubernetes' own libraries are placeholders in its go.mod: each is replaced by its release of the
# same number.
{ echo "require $module $version"
  sed -n "s|^\t\(k8s.io/[a-z-]*\) v0.0.0\$|replace \1 => \1 v0.${version#v1.}|p" \
    "$(go env GOMODCACHE)/$module@$version/go.mod"; } >>go.mod
go mod tidy
about=k8s.io/component-base/version minor=$(cut -d. -f2 <<<"$version")
go build -o "$dir" -ldflags "-s -w -X $about.gitVersion=$version -X $about.gitMajor=1 -X $about.gitMinor=$minor" \
  "$module/cmd/kubelet"

begin containerd
programs=(containerd containerd-shim-runc-v2 ctr)
{ printf '//go:build tools\npackage lab\nimport (\n'
  printf "_ \"$containerd/cmd/%s\"\n" "${programs[@]}"
  printf ')\n'; } >tools.go
echo "require $containerd $containerd_version" >>go.mod
go mod tidy
go build -o "$dir" -ldflags "-s -w -X $containerd/version.Version=$containerd_version" "${programs[@]/#/$containerd/cmd/}"

for name in coredns logind pause; do
  begin "$name"
  cp "$here/$name.go" main.go
  case $name in
    coredns) echo "require $coredns $coredns_version" >>go.mod ;;
    logind) echo "require $dbus $dbus_version" >>go.mod ;;
  esac
  go mod tidy
  go build -o "$dir/$name" -ldflags "-s -w" .
done
echo "$all" >"$dir/built"
