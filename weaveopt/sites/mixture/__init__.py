"""Sites of the kinds `mixture` and `expert_exchange`: experts in the forms that graphs have, and what chose them."""
