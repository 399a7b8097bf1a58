#!/bin/sh
# What an allocation runs: the program that is named, once on each node, until all of them have ended.
exec srun --quiet --no-kill --kill-on-bad-exit=0 --wait=0 --overlap --mem=0 --cpu-bind=none --ntasks-per-node=1 --input=none "$@"
