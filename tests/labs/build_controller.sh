#!/usr/bin/env bash
# build_controller.sh kueue|jobset DIR [VERSION]: builds a controller of Kubernetes from its Go
# module into DIR, with the manifests of its types and webhooks. It takes Go, about 5 minutes on two
# cores the first time, and 2 GB of disk.
set -euo pipefail
name=${1:?"kueue or jobset"} dir=${2:?"the folder for it, such as ~/kueue"}
module=sigs.k8s.io/$name
case $name in
  kueue) version=${3:-v0.17.0} main=$module/cmd/kueue ;;
  jobset) version=${3:-v0.11.1} main=$module ;;
  *) echo "there are kueue and jobset, no $name" >&2; exit 1 ;;
esac
command -v go >/dev/null || { echo "$name needs go, which is not installed" >&2; exit 1; }
mkdir -p "$dir/src" "$dir/types"
cd "$dir"
if [ "$(cat built 2>/dev/null)" = "$version" ]; then exit 0; fi
echo "building $name $version in $dir; the first time this takes some minutes" >&2
cd src
export GOFLAGS=-mod=mod CGO_ENABLED=0
printf 'module lab\ngo 1.26.0\nrequire %s %s\n' "$module" "$version" >go.mod
printf '//go:build tools\npackage lab\nimport _ "%s"\n' "$main" >tools.go
go mod tidy
go build -o "../$name" -ldflags "-s -w -X $module/pkg/version.GitVersion=$version" "$main"
config=$(go list -m -f '{{.Dir}}' "$module")/config/components
install -m 644 "$config"/crd/bases/*.yaml ../types
install -m 644 "$config/webhook/manifests.yaml" ../webhooks.yaml
echo "$version" >../built
