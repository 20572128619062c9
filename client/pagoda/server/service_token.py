"""The token that processes of one machine show each other, so that no other user of the machine calls them."""

from dataclasses import replace

from pagoda_common.config.security_config import TOKEN_VARIABLE, SecurityConfig
from pagoda_common.rpc.local_token import new_token


def with_token(security: SecurityConfig) -> SecurityConfig:
    """`security` with a new token, where it has neither a token nor TLS."""
    return security if security.is_guarded else replace(security, service_token=new_token())


def token_environment(security: SecurityConfig) -> dict[str, str]:
    """Variables that give the token to a child: every user of the machine may read a command line."""
    return {TOKEN_VARIABLE: security.service_token} if security.service_token else {}
