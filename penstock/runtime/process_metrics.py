"""Metrics that every process serves of itself: CPU time by role, memory, files, its certificate."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class _CpuSeconds(Collector):
    """Collects CPU time of this process and the children it has waited for, by role."""

    role = "unknown"

    def collect(self) -> Iterator[Metric]:
        """Yield one series."""
        times = os.times()
        total = times.user + times.system + times.children_user + times.children_system
        family = CounterMetricFamily(
            "penstock_cpu_seconds", "CPU time used by this process, in seconds", labels=["role"]
        )
        family.add_metric([self.role], total)
        yield family


class _CertificateExpiry(Collector):
    """Collects the time at which the certificate of this process expires; no series without one.

    The file is read at every scrape, because certificates are rotated.
    """

    path: Path | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield one series; its value is 0, long ago, when the file cannot be read."""
        if self.path is None:
            return
        family = GaugeMetricFamily(
            "penstock_certificate_expiry_timestamp_seconds",
            "When the certificate of this process runs out, in seconds since 1970; 0: it cannot be read",
        )
        family.add_metric([], certificate_expiry_s(self.path))
        yield family


def certificate_expiry_s(path: Path) -> float:
    """Return the first moment at which a certificate of the PEM file's chain expires, in seconds since 1970.

    Returns 0 when there is no such file.
    """
    # Only processes with TLS need to load it.
    from cryptography import x509  # noqa: PLC0415

    try:
        chain = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError):
        return 0.0
    return min(one.not_valid_after_utc.timestamp() for one in chain)


PROCESS: Final = CollectorRegistry()
ProcessCollector(registry=PROCESS)
PlatformCollector(registry=PROCESS)
_cpu = _CpuSeconds()
PROCESS.register(_cpu)
_certificate = _CertificateExpiry()
PROCESS.register(_certificate)


def role() -> str:
    """Return the role of this process; "unknown" before `set_role`."""
    return _cpu.role


def set_role(name: str) -> None:
    """Set the role of this process, which says what it serves and labels its CPU seconds.

    name: such as "actor" or "broker".
    """
    _cpu.role = name


def watch_certificate(path: Path | None) -> None:
    """Export when the certificate in this PEM file expires; None: this process has no certificate."""
    _certificate.path = path
