"""How we log in to RabbitMQ: user, password and certificates, read anew for each connection."""

import ssl

from yarl import URL

from bridge.config import RabbitMQSettings
from bridge.credentials import load_authorities, read_secret, unreadable
from bridge.errors import ConfigError


def with_credentials(url: URL, settings: RabbitMQSettings) -> URL:
    """Put `rabbitmq.username` and `.password`, or their files, in place of those in a URL."""
    username, password = settings.username, None
    if settings.username_file is not None:
        username = read_secret("rabbitmq.username_file", settings.username_file)
    if settings.password is not None:
        password = settings.password.get_secret_value()
    if settings.password_file is not None:
        password = read_secret("rabbitmq.password_file", settings.password_file)
    url = url if username is None else url.with_user(username)
    return url if password is None else url.with_password(password)


def tls_context(settings: RabbitMQSettings) -> ssl.SSLContext:
    """Make the TLS context; raises ConfigError when a file of `rabbitmq.tls` cannot be used."""
    tls = settings.tls
    context = load_authorities("rabbitmq.tls.ca_file", tls.ca_file)
    for name, path in (("cert_file", tls.cert_file), ("key_file", tls.key_file)):
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise unreadable(f"rabbitmq.tls.{name}", path, error) from None
    if tls.cert_file is not None:
        try:
            context.load_cert_chain(tls.cert_file, tls.key_file)
        except OSError:  # ssl.SSLError is one
            raise ConfigError(
                f"rabbitmq.tls.cert_file: {tls.cert_file} and rabbitmq.tls.key_file are not a "
                "certificate and its key; they must be PEM files that belong together"
            ) from None
    return context
