"""From the SMS service's webhooks to the exchange."""
