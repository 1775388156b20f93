"""Whether it may be approved, the VM is prepared, and it is back.

Commands and documents come in; POSTs to IMDS, programs and receipts go out. It never approves what the policy does
not allow, or what the document does not show as Scheduled.
"""
