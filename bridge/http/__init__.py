"""The HTTP server of the webhook port and the admin port."""
