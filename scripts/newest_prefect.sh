#!/usr/bin/env bash
# Make an environment with the newest supported Prefect (scripts/prefect-newest.txt) on top of the one named: it sees all packages of
# that one, torch and Holdfast included, and holds nothing else of its own. Print its interpreter. Takes seconds, and 40 MB of disk.
set -euo pipefail
cd "$(dirname "$0")/.."

base=${1:-.venv}
place=build/newest-prefect
wanted="$(cksum <scripts/prefect-newest.txt) $("$base/bin/python" -c 'import sys; print(sys.version)')"
if [[ $(cat "$place/.made" 2>/dev/null) != "$wanted" ]]; then
  rm -rf "$place"
  "$base/bin/python" -m venv --without-pip "$place"
  "$base/bin/python" -m pip --disable-pip-version-check --python "$place/bin/python" install -qq --no-deps -r scripts/prefect-newest.txt
  packages=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # addsitedir and not the bare path: that also reads the .pth files there, as an editable install has one
  echo "import site; site.addsitedir('$packages')" >"$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
  echo "$wanted" >"$place/.made"
fi
echo "$place/bin/python"
