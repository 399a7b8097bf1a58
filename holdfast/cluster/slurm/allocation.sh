#!/bin/sh
# The batch script of an allocation: it runs the given program once on each node until all of them have ended. The first two arguments are
# log files: the first whose folder exists on this node is used. Slurm itself would fail an allocation whose log cannot be written.
for log in "$1" "$2"; do
    log="${log%\%j.log}${SLURM_JOB_ID}.log"
    if touch "$log" 2>/dev/null; then
        exec >>"$log" 2>&1
        break
    fi
done
shift 2
exec srun --quiet --no-kill --kill-on-bad-exit=0 --wait=0 --overlap --mem=0 --cpu-bind=none --ntasks-per-node=1 --input=none "$@"
