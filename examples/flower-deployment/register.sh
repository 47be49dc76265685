#!/usr/bin/env bash
# Tells the SuperLink which nodes may connect: register.sh KEYS/node-*.pub. Environment: see environment.sh.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
mkdir -p "$FLWR_HOME"
# The connection "fleet" of flwr run and all other commands of flwr.
if ! grep -qs '^\[superlink.fleet\]' "$FLWR_HOME/config.toml"; then
  printf '[superlink.fleet]\naddress = "%s:%s"\nroot-certificates = "%s"\n' "$HOST" "$PORT" "$KEYS/ca.crt" \
    >> "$FLWR_HOME/config.toml"
fi
for key in "$@"; do
  flwr supernode register "$key" fleet --name "$(basename "$key" .pub)"
done
