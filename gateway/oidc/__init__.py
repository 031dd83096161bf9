"""Tokens (JWT, RFC 7519) of issuers that the gateway trusts, as OpenID Connect has them, in place of API keys.

`tokens` is what the rest of the gateway sees: from a token to a caller, remembered. `verify` judges one token, by the
`keys` that its `issuer` publishes and keeps fresh. `callers` is what may come of a token.
"""
