#!/bin/sh
# Makes sure of what the witnesses and the integration tests compile with: make-tools.sh PYTHON
set -eu
python=$1

missing=
need() {
  missing="$missing $1"
}
command -v git >/dev/null 2>&1 || need git
command -v gcc >/dev/null 2>&1 || need gcc
command -v g++ >/dev/null 2>&1 || need g++
header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
[ -f "$header" ] || need python3-dev
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing$missing with apt-get" >&2
  apt-get update -qq
  # shellcheck disable=SC2086 # one word a package
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing >/dev/null
fi
for program in git gcc g++; do
  command -v "$program" >/dev/null 2>&1 || {
    echo "error: the tests compile real code, and $program is not installed. Next: as root: apt-get install$missing." >&2
    exit 14
  }
done
[ -f "$header" ] || {
  echo "error: the tests compile a Python module, and there is no $header. Next: install the headers of $python (Debian: python3-dev)." >&2
  exit 14
}
