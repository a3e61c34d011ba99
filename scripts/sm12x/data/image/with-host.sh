#!/bin/sh
# Runs one command of the image build with what the host's own package clients use: its CA bundle,
# proxies, package indexes and Debian mirror. They are mounted as build secrets, each of them only
# if the host has it, so that no layer and no label ever holds them.
set -eu
secrets=/run/secrets

if [ -s "$secrets/ca" ]; then
  for name in SSL_CERT_FILE REQUESTS_CA_BUNDLE CURL_CA_BUNDLE PIP_CERT GIT_SSL_CAINFO; do
    export "$name=$secrets/ca"
  done
fi
if [ -s "$secrets/env" ]; then
  . "$secrets/env"
fi
if [ -s "$secrets/uv.toml" ]; then
  export UV_CONFIG_FILE="$secrets/uv.toml"
fi
if [ -s "$secrets/netrc" ]; then
  export NETRC="$secrets/netrc"
fi
if [ -s "$secrets/apt.conf" ]; then
  export APT_CONFIG="$secrets/apt.conf"
fi
export DEBIAN_FRONTEND=noninteractive
exec "$@"
