"""The signature schemes of webhooks, and their verification."""
