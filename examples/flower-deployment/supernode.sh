#!/usr/bin/env bash
# A SuperNode: supernode.sh node-0 'partition-id=0 level=2'. Environment: see environment.sh.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
node=$1 config=$2
mkdir -p "$STATE/$node"
# Its own port is for its own processes and stays on this machine; several nodes on one machine need one each.
exec flower-supernode --superlink "$HOST:$PORT" --port "${NODE_PORT:-9094}" --root-certificates "$KEYS/ca.crt" \
  --auth-supernode-private-key "$KEYS/$node.key" --node-config "$config state-dir=\"$STATE/$node\""
