#!/usr/bin/env bash
# Tells the SuperLink which nodes may connect: register.sh KEYS/node-*.pub. Environment: see environment.sh.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
mkdir -p "$FLWR_HOME"
# The connection "fleet" of flwr run and all other commands of flwr, in place of an older one.
touch "$FLWR_HOME/config.toml"
awk 'BEGIN { keep = 1 } /^\[/ { keep = $0 != "[superlink.fleet]" } keep' "$FLWR_HOME/config.toml" > "$FLWR_HOME/config.new"
printf '[superlink.fleet]\naddress = "%s:%s"\nroot-certificates = "%s"\n' "$HOST" "$PORT" "$KEYS/ca.crt" \
  >> "$FLWR_HOME/config.new"
mv "$FLWR_HOME/config.new" "$FLWR_HOME/config.toml"
[ $# -gt 0 ] || exit 0
seconds=0
until (exec 3<> "/dev/tcp/$HOST/$PORT") 2> /dev/null; do
  [ $((seconds += 1)) -lt 60 ] || { echo "register.sh: no SuperLink answers at $HOST:$PORT" >&2; exit 1; }
  sleep 1
done
failed=0
for key in "$@"; do
  flwr supernode register "$key" fleet --name "$(basename "$key" .pub)" || failed=1   # one that it knows already
done
exit $failed
