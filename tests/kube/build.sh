#!/usr/bin/env bash
# A real kube-apiserver (1.20.2) and etcd for the tests beside this script; prints the folder that holds both. They are kept in
# the user's cache under this script's hash, so a machine builds them once: about 5 minutes on two cores.
#
# Made of Debian 12's own source package `kubernetes` (Apache-2.0) with Debian's Go 1.19. Nothing is installed and root is
# not needed: packages are fetched through an apt configuration of its own, which has the machine's sources, and unpacked.
# Three traps are handled: the vendored reflect2 crashes under Go >= 1.18, so Debian's takes its place; the generated OpenAPI
# file is not in the tarball; the version has to be set on two packages.
set -euo pipefail
umask 022

out=${XDG_CACHE_HOME:-$HOME/.cache}/headrace/kube-$(sha256sum "$0" | cut -c1-12)
if [[ -x $out/kube-apiserver && -x $out/etcd ]]; then echo "$out"; exit 0; fi
log() { echo "kube-apiserver: $*" >&2; }
command -v apt-get >/dev/null && command -v dpkg >/dev/null || { log "only Debian 12 has what it is built of"; exit 1; }

work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
mkdir -p "$work"/apt/{sources,state/lists/partial,cache/archives/partial} "$work"/{debs,root}
if [[ -e /etc/apt/sources.list.d/debian.sources ]]; then
  sed 's/^Types: .*/Types: deb deb-src/' /etc/apt/sources.list.d/debian.sources >"$work/apt/sources/debian.sources"
fi
if [[ -e /etc/apt/sources.list ]]; then
  sed -n '/^deb /{p;s/^deb /deb-src /p}' /etc/apt/sources.list >"$work/apt/sources/debian.list"
fi
cat >"$work/apt/apt.conf" <<CONF
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "$work/apt/sources";
Dir::State "$work/apt/state";
Dir::State::status "/var/lib/dpkg/status";
Dir::Cache "$work/apt/cache";
APT::Sandbox::User "root";
CONF
export APT_CONFIG=$work/apt/apt.conf
log "fetching sources, Go and etcd from Debian"
apt-get update -qq >&2
cd "$work/debs"
apt-get download -qq golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev etcd-server >&2
for deb in *.deb; do dpkg -x "$deb" "$work/root"; done
apt-get source -qq --download-only kubernetes >&2
unset APT_CONFIG

export GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$work/go GOCACHE=$work/gocache
export GO111MODULE=off CGO_ENABLED=0 GOPROXY=off GOFLAGS=
export PATH=$GOROOT/bin:$PATH
mkdir -p "$GOPATH/src/k8s.io"
tar xzf kubernetes_*.orig.tar.gz -C "$GOPATH/src/k8s.io"
mv "$GOPATH"/src/k8s.io/kubernetes-* "$GOPATH/src/k8s.io/kubernetes"
cd "$GOPATH/src/k8s.io/kubernetes"
reflect2=vendor/github.com/modern-go/reflect2
rm -rf "$reflect2"
mkdir "$reflect2"
cp "$work"/root/usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} "$reflect2/"
rm -f "$reflect2"/*_test.go

log "generating OpenAPI definitions"
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
dirs=$( { grep -rl --include='*.go' '+k8s:openapi-gen=' pkg cmd plugin
          (cd staging/src && grep -rl --include='*.go' '+k8s:openapi-gen=' k8s.io | sed 's#^#vendor/#'); } |
        grep -v -E '_test.go|/testdata/|_examples|sample-|code-generator|pkg/generated/openapi|zz_generated' |
        xargs -n1 dirname | sort -u | sed 's#^#k8s.io/kubernetes/#' | paste -sd,)
"$work/openapi-gen" --logtostderr -i "$dirs" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h hack/boilerplate/boilerplate.generatego.txt -r "$work/violations.txt" >&2

log "compiling, which takes some minutes"
flags="-s -w"
for package in client-go/pkg/version component-base/version; do
  version=k8s.io/kubernetes/vendor/k8s.io/$package
  flags="$flags -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20"
done
go build -tags providerless,dockerless -ldflags "$flags" -o "$work/kube-apiserver" ./cmd/kube-apiserver
mkdir -p "$(dirname "$out")"
staged=$(mktemp -d "$out.XXXXXX")
cp "$work/kube-apiserver" "$work/root/usr/bin/etcd" "$staged/"
mv -T "$staged" "$out" 2>/dev/null || rm -rf "$staged"  # another was faster
log "done"
echo "$out"
