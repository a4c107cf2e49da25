"""`sms-bridge init`: five questions, and a configuration that works written from the answers."""
