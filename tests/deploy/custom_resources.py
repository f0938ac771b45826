"""The fields of other people's resources that the manifests use: whatever else stands there is a mistake.

kubernetes-validate knows Kubernetes' own kinds. These follow the definitions of cert-manager.io/v1,
monitoring.coreos.com/v1 and keda.sh/v1alpha1.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Duration = Annotated[str, Field(pattern=r"^([0-9]+(h|m|s|ms))+$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=253)]
Count = Annotated[int, Field(ge=0)]


class Part(BaseModel):
    """Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


class Metadata(Part):
    """Of any object."""

    name: Name
    namespace: Name
    labels: dict[str, str] = {}


class Resource(Part):
    """What every object has."""

    metadata: Metadata


# cert-manager


class SecretName(Part):
    """Where an authority's key lies."""

    secretName: Name  # noqa: N815 - as it is written there


class IssuerSpec(Part):
    """One of the two kinds that are used."""

    selfSigned: dict[str, Any] | None = None  # noqa: N815
    ca: SecretName | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "IssuerSpec":
        if (self.selfSigned is None) == (self.ca is None):
            raise ValueError("an issuer is either selfSigned or ca")
        return self


class Issuer(Resource):
    """Signs certificates."""

    apiVersion: Literal["cert-manager.io/v1"]  # noqa: N815
    kind: Literal["Issuer"]
    spec: IssuerSpec


class IssuerReference(Part):
    """Who signs."""

    name: Name
    kind: Literal["Issuer", "ClusterIssuer"]


class PrivateKey(Part):
    """How the key is made."""

    algorithm: Literal["RSA", "ECDSA", "Ed25519"]
    size: int
    rotationPolicy: Literal["Always", "Never"] | None = None  # noqa: N815


class CertificateSpec(Part):
    """A certificate and the secret that it is put into."""

    secretName: Name  # noqa: N815
    issuerRef: IssuerReference  # noqa: N815
    commonName: Annotated[str, Field(max_length=64)] | None = None  # noqa: N815
    isCA: bool = False  # noqa: N815
    duration: Duration
    renewBefore: Duration | None = None  # noqa: N815
    privateKey: PrivateKey  # noqa: N815
    usages: list[Literal["digital signature", "server auth", "client auth"]] = []
    uris: list[str] = []
    dnsNames: list[str] = []  # noqa: N815


class Certificate(Resource):
    """Wanted from an issuer."""

    apiVersion: Literal["cert-manager.io/v1"]  # noqa: N815
    kind: Literal["Certificate"]
    spec: CertificateSpec


# Prometheus operator


class Expression(Part):
    """One condition on labels."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: list[str] = []


class Selector(Part):
    """Which pods."""

    matchLabels: dict[str, str] = {}  # noqa: N815
    matchExpressions: list[Expression] = []  # noqa: N815


class Relabeling(Part):
    """Takes a label of the target over."""

    sourceLabels: list[str]  # noqa: N815
    targetLabel: str  # noqa: N815


class MetricsEndpoint(Part):
    """A port by its name."""

    port: str
    relabelings: list[Relabeling] = []
    path: Annotated[str, Field(pattern="^/")]
    interval: Duration


class PodMonitorSpec(Part):
    """What is scraped."""

    selector: Selector
    podTargetLabels: list[str] = []  # noqa: N815
    podMetricsEndpoints: Annotated[list[MetricsEndpoint], Field(min_length=1)]  # noqa: N815


class PodMonitor(Resource):
    """Has Prometheus scrape pods."""

    apiVersion: Literal["monitoring.coreos.com/v1"]  # noqa: N815
    kind: Literal["PodMonitor"]
    spec: PodMonitorSpec


class Rule(Part):
    """One alert, or one query under a name."""

    alert: Annotated[str, Field(pattern=r"^[A-Za-z]+$")] | None = None
    record: Annotated[str, Field(pattern=r"^[a-z:_]+$")] | None = None
    expr: str
    # Named as the field is: a word of the language.
    duration: Annotated[Duration | None, Field(alias="for")] = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class RuleGroup(Part):
    """Evaluated together."""

    name: str
    rules: Annotated[list[Rule], Field(min_length=1)]


class PrometheusRuleSpec(Part):
    """All groups."""

    groups: Annotated[list[RuleGroup], Field(min_length=1)]


class PrometheusRule(Resource):
    """Has Prometheus record and alert."""

    apiVersion: Literal["monitoring.coreos.com/v1"]  # noqa: N815
    kind: Literal["PrometheusRule"]
    spec: PrometheusRuleSpec


# KEDA


class ScalingPolicy(Part):
    """How fast."""

    type: Literal["Pods", "Percent"]
    value: Annotated[int, Field(gt=0)]
    periodSeconds: Annotated[int, Field(gt=0, le=1800)]  # noqa: N815


class ScalingRules(Part):
    """In one direction."""

    stabilizationWindowSeconds: Annotated[int, Field(ge=0, le=3600)]  # noqa: N815
    policies: Annotated[list[ScalingPolicy], Field(min_length=1)]


class Behavior(Part):
    """In both."""

    scaleUp: ScalingRules  # noqa: N815
    scaleDown: ScalingRules  # noqa: N815


class AutoscalerConfig(Part):
    """What KEDA hands to the autoscaler that it makes."""

    behavior: Behavior


class Advanced(Part):
    """Beside the triggers."""

    horizontalPodAutoscalerConfig: AutoscalerConfig  # noqa: N815


class PrometheusQuery(Part):
    """All of them strings."""

    serverAddress: Annotated[str, Field(pattern="^https?://")]  # noqa: N815
    query: str
    threshold: Annotated[str, Field(pattern=r"^[0-9.]+$")]
    ignoreNullValues: Literal["true", "false"] = "true"  # noqa: N815


class Trigger(Part):
    """A number and what it is to be."""

    type: Literal["prometheus"]
    name: Name
    metricType: Literal["Value", "AverageValue"]  # noqa: N815
    metadata: PrometheusQuery


class ScaleTarget(Part):
    """A Deployment of the namespace."""

    name: Name


class ScaledObjectSpec(Part):
    """What is scaled, between which numbers, by what."""

    scaleTargetRef: ScaleTarget  # noqa: N815
    minReplicaCount: Count  # noqa: N815
    maxReplicaCount: Annotated[int, Field(gt=0)]  # noqa: N815
    pollingInterval: Annotated[int, Field(gt=0)]  # noqa: N815
    advanced: Advanced
    triggers: Annotated[list[Trigger], Field(min_length=1)]


class ScaledObject(Resource):
    """Has KEDA scale a Deployment."""

    apiVersion: Literal["keda.sh/v1alpha1"]  # noqa: N815
    kind: Literal["ScaledObject"]
    spec: ScaledObjectSpec


KINDS: dict[str, type[Resource]] = {
    kind.__name__: kind for kind in (Issuer, Certificate, PodMonitor, PrometheusRule, ScaledObject)
}
