#!/usr/bin/env bash
# Write constraints.txt anew: the whole closure of the extras `all` and `dev` and of the build, one version each, for
# every Python and Linux machine that pyproject.toml allows. Versions already locked stay, unless UPGRADE=1 is set.
set -euo pipefail
cd "$(dirname "$0")/.."

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check uv

# uv keeps the versions that it finds in the file it is to write.
if [[ -z ${UPGRADE:-} && -f constraints.txt ]]; then cp constraints.txt "$place/locked.txt"; fi
printf 'hatchling\neditables\n' >"$place/build.in" # editables: what hatchling wants for `pip install -e`

"$place/venv/bin/uv" pip compile pyproject.toml "$place/build.in" --extra all --extra dev \
  --universal --python-version 3.11 --fork-strategy fewest \
  --no-annotate --no-header --no-emit-index-url --no-emit-find-links --quiet --output-file "$place/locked.txt" >/dev/null

{
  echo "# Every version that Holdfast is tested with, written by scripts/lock.sh (\`make lock\`)."
  echo "# torch has no local version on purpose: an index with CPU or CUDA builds both satisfy it."
  grep -vE " ; sys_platform == 'win32'\$" "$place/locked.txt" # Holdfast runs on Linux
} >constraints.txt
echo "constraints.txt: $(grep -c == constraints.txt) versions"
