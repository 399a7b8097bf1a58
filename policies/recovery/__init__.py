"""The answer to an incident: rules from a case to a decision, and the policies that order them."""
