#!/usr/bin/env bash
# build_kueue.sh DIR [VERSION]: builds Kueue's controller from its Go module into DIR, with the
# manifests of its types and webhooks. It takes Go, about 5 minutes on two cores the first time, and
# 2 GB of disk.
set -euo pipefail
dir=${1:?"the folder for Kueue, such as ~/kueue"} version=${2:-v0.17.0}
command -v go >/dev/null || { echo "Kueue needs go, which is not installed" >&2; exit 1; }
mkdir -p "$dir/src" "$dir/types"
cd "$dir"
if [ "$(cat built 2>/dev/null)" = "$version" ]; then exit 0; fi
echo "building Kueue $version in $dir; the first time this takes some minutes" >&2
cd src
export GOFLAGS=-mod=mod CGO_ENABLED=0
module=sigs.k8s.io/kueue
printf 'module lab\ngo 1.26.0\nrequire %s %s\n' "$module" "$version" >go.mod
printf '//go:build tools\npackage lab\nimport _ "%s/cmd/kueue"\n' "$module" >tools.go
go mod tidy
go build -o .. -ldflags "-s -w -X $module/pkg/version.GitVersion=$version" "$module/cmd/kueue"
config=$(go list -m -f '{{.Dir}}' "$module")/config/components
install -m 644 "$config"/crd/bases/*.yaml ../types
install -m 644 "$config/webhook/manifests.yaml" ../webhooks.yaml
echo "$version" >../built
