#!/bin/sh
# The drive's own rate on one file, as fio reaches it with io_uring, direct I/O, fixed buffers and a registered
# file. JSON lines.
# usage: fio.sh FILE [SIZE=1G] [BLOCK=1M] [DEPTH=32]
set -eu
file=$1 size=${2:-1G} block=${3:-1M} depth=${4:-32}
[ -e "$file" ] || fio --name=fill --filename="$file" --size="$size" --rw=write --bs=4M --iodepth=16 \
  --ioengine=io_uring --direct=1 --output=/dev/null
for rw in read write rw; do
  fio --name=peer --filename="$file" --size="$size" --rw=$rw --bs="$block" --iodepth="$depth" --ioengine=io_uring \
      --direct=1 --fixedbufs=1 --registerfiles=1 --refill_buffers=0 --scramble_buffers=0 --loops=3 \
      --output-format=json | python3 -c '
import json, sys
job = json.load(sys.stdin)["jobs"][0]
done = [job[k] for k in ("read", "write") if job[k]["io_bytes"]]
gib = sum(d["io_bytes"] for d in done) / 2**30
ms = max(d["runtime"] for d in done)
cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * ms / 1000 / gib
print(json.dumps({"name": "fio_'$rw'", "gb_per_s": round(gib * 2**30 / ms / 1e6, 2), "cpu_s_per_gib": round(cpu, 4),
                  "block": "'$block'", "queue_depth": '$depth'}))'
done
