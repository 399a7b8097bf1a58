"""The support bundle: one file with what a helper needs to see of an installation and a job, without secrets.

It only reads; secrets are recognised by `redactor` on top of `holdfast.security.redaction`.
"""
