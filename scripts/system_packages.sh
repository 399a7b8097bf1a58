#!/usr/bin/env bash
# Install the system packages that tests need and this machine lacks. To add one: a row in `needed`.
set -euo pipefail

# package | how to see that it is there (any path or command of the list)
needed="
chromium       | chromium chromium-browser google-chrome google-chrome-stable
postgresql     | initdb /usr/lib/postgresql/*/bin/initdb
procps         | ps
openssh-server | /usr/sbin/sshd /usr/local/sbin/sshd
util-linux     | unshare prlimit
munge          | /usr/sbin/munged
slurm-client   | sbatch
slurm-wlm-basic-plugins | /usr/lib/*/slurm-wlm/serializer_json.so /usr/lib/*/slurm/serializer_json.so
slurmctld      | /usr/sbin/slurmctld
slurmd         | /usr/sbin/slurmd
iproute2       | ip
iputils-ping   | ping
iptables       | iptables /usr/sbin/iptables
faketime       | faketime
prometheus     | prometheus
zsh            | zsh
fish           | fish
"

present() { # any of the commands or (globbed) paths in $@
  local sign
  for sign in "$@"; do
    if [[ $sign == /* ]]; then
      compgen -G "$sign" >/dev/null && return 0
    else
      command -v "$sign" >/dev/null && return 0
    fi
  done
  return 1
}

set -f # signs are globbed by `present` alone
missing=()
while IFS='|' read -r package signs; do
  [[ -n ${package// /} ]] || continue
  # shellcheck disable=SC2086 # the list is to be split
  present $signs || missing+=("${package// /}")
done <<<"$needed"
set +f

if ((${#missing[@]} == 0)); then exit 0; fi

root=()
if ((EUID != 0)); then root=(sudo -n); fi
if ! command -v apt-get >/dev/null || ! "${root[@]}" true 2>/dev/null; then
  echo "Missing system packages: ${missing[*]}. Install them (Debian names); tests that need them are skipped until then." >&2
  [[ -z ${CI:-} ]] # where nobody watches, a skipped test is a lie
  exit
fi

echo "Installing system packages: ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# RUNLEVEL=1 for init scripts, SYSTEMD_OFFLINE=1 for units: no service (PostgreSQL, Prometheus) is started now; tests start their own.
if ! { "${root[@]}" apt-get update -qq && "${root[@]}" env RUNLEVEL=1 SYSTEMD_OFFLINE=1 DEBIAN_FRONTEND=noninteractive \
  apt-get install -qq -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 </dev/null; then
  tail -n 20 "$log" >&2
  exit 1
fi
