"""From a decision to training again: isolate, reschedule and start, by a restart or in the running processes; and waiting.

The policy chooses the action (`policies`); ranks that move without a fault are in `holdfast.control.migration`.
"""
