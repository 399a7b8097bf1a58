#!/usr/bin/env bash
# Build the API server of Kubernetes 1.20 from Debian 12's source package, with Debian's Go and etcd; print the folder with both programs.
# Nothing is installed: packages are unpacked into build/kubernetes. It takes 15 minutes of one core, 3 GB of disk and 100 MB of downloads, once.
set -euo pipefail
cd "$(dirname "$0")/.."

base=${1:-build/kubernetes}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
mkdir -p "$base" && base=$(cd "$base" && pwd)

if [[ -x $base/bin/kube-apiserver && -x $base/bin/etcd ]]; then
  echo "$base/bin"
  exit
fi
if ! command -v apt-get >/dev/null || [[ ! -e $keyring ]]; then
  echo "kube_apiserver.sh needs apt-get and the package debian-archive-keyring" >&2
  exit 1
fi

# An apt of its own: other lists, another cache, and no lock of the system's.
apt=("$base/apt/lists/partial" "$base/apt/cache/archives/partial" "$base/apt/parts" "$base/debs" "$base/bin")
mkdir -p "${apt[@]}"
printf 'Types: deb deb-src\nURIs: %s\nSuites: bookworm\nComponents: main\nSigned-By: %s\n' "$mirror" "$keyring" >"$base/apt/parts/bookworm.sources"
get() {
  apt-get -qq -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$base/apt/parts" -o Dir::State::lists="$base/apt/lists" \
    -o Dir::Cache="$base/apt/cache" -o APT::Sandbox::User=root "$@"
}

{
  cd "$base/debs"
  get update
  get download golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev etcd-server
  get --download-only source kubernetes
  for package in ./*.deb; do dpkg -x "$package" "$base/root"; done

  # The source expects to be at its place in a GOPATH: that is how Debian builds it too.
  tree=$base/gopath/src/k8s.io/kubernetes
  mkdir -p "$tree"
  tar -xf kubernetes_*.orig.tar.gz -C "$tree" --strip-components 1
  # The package has a reflect2 from before Go 1.18, which crashes with the maps of newer ones.
  rm -r "$tree/vendor/github.com/modern-go/reflect2"
  cp -r "$base/root/usr/share/gocode/src/github.com/modern-go/reflect2" "$tree/vendor/github.com/modern-go/"

  export GOROOT=$base/root/usr/lib/go-1.19 GOPATH=$base/gopath GOCACHE=$base/cache GO111MODULE=off CGO_ENABLED=0
  export PATH=$GOROOT/bin:$PATH
  cd "$tree"
  # One generated file is not part of the source: the definitions of all objects.
  nice -n 19 go build -p 1 -o "$base/bin/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
  packages=$(find -L vendor/k8s.io pkg cmd plugin -name '*.go' ! -path '*/code-generator/*' ! -path '*/sample-apiserver/*' \
    ! -path '*/testdata/*' -print0 | { xargs -0 grep -l '^// *+k8s:openapi-gen=' || true; } | xargs -n1 dirname | LC_ALL=C sort -u |
    sed 's#^#k8s.io/kubernetes/#' | paste -sd, -)
  nice -n 19 "$base/bin/openapi-gen" -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h hack/boilerplate/boilerplate.generatego.txt -r "$base/violations.report"
  nice -n 19 go build -p 1 -trimpath -ldflags "-s -w" -o "$base/bin/kube-apiserver" k8s.io/kubernetes/cmd/kube-apiserver
  cp "$base/root/usr/bin/etcd" "$base/bin/"
  rm -rf "$base/cache" "$base/gopath" "$base/root" "$base/debs" "$base/apt"
} >&2
echo "$base/bin"
