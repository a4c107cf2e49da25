"""How webhooks are signed: the schemes of the services, and their verification."""
