#!/bin/sh
# Makes the Python environment of the checkout: make-venv.sh PYTHON FOLDER
set -eu
python=$1
venv=$2

fail() {
  echo "error: $1. Next: $2." >&2
  exit "${3:-14}"
}

# pip says the same of a package that is not there and of an index that cannot be reached.
install() {
  "$venv/bin/pip" install --quiet --disable-pip-version-check "$@" ||
    fail "pip could not install what the environment needs; its lines above say why" \
      "check network, proxy and pip's configuration (index-url, cert), and free space under $venv, then run make again" 6
}

command -v "$python" >/dev/null 2>&1 ||
  fail "$python is not installed" "install Python 3.11 or newer, or run make with PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" --version) is too old, 3.11 is needed" "run make with PYTHON=/path/to/a/newer/python3"
# Debian and Ubuntu ship venv's ensurepip in a package of its own.
if ! "$python" -c 'import ensurepip' >/dev/null 2>&1; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing python3-venv (Debian keeps it apart from python3)" >&2
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null; } ||
      fail "python3-venv could not be installed" "mend what apt-get reports above, then run make again"
  else
    fail "$python has no ensurepip" "as root: apt-get install python3-venv"
  fi
fi
echo "setting up $venv (about 60 MB from the package index)" >&2
# A half-made environment from an interrupted run is not worth mending.
rm -rf "$venv"
"$python" -m venv "$venv"
install --require-hashes -r scripts/requirements-dev.lock
install --no-deps --no-build-isolation --editable .
# No script of pyproject.toml: the image is built from that file, and has no sm12x_dev.
cat >"$venv/bin/sm12x-dev" <<'END'
#!/bin/sh
exec "$(dirname "$0")/python" -P -m sm12x_dev "$@"
END
chmod +x "$venv/bin/sm12x-dev"
touch "$venv/.installed"
