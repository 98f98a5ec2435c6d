"""The sample ledger: every rank writes down its samples, and `lockstep ledger` checks them."""
