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
    model_config = ConfigDict(extra="forbid")


class Metadata(Part):
    name: Name
    namespace: Name
    labels: dict[str, str] = {}


class Resource(Part):
    metadata: Metadata


# cert-manager


class IssuerSpec(Part):
    selfSigned: dict[str, Any] | None = None  # noqa: N815
    ca: dict[Literal["secretName"], Name] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "IssuerSpec":
        if (self.selfSigned is None) == (self.ca is None):
            raise ValueError("an issuer is either selfSigned or ca")
        return self


class Issuer(Resource):
    apiVersion: Literal["cert-manager.io/v1"]  # noqa: N815
    kind: Literal["Issuer"]
    spec: IssuerSpec


class IssuerReference(Part):
    name: Name
    kind: Literal["Issuer", "ClusterIssuer"]


class PrivateKey(Part):
    algorithm: Literal["RSA", "ECDSA", "Ed25519"]
    size: int
    rotationPolicy: Literal["Always", "Never"] | None = None  # noqa: N815


class CertificateSpec(Part):
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
    apiVersion: Literal["cert-manager.io/v1"]  # noqa: N815
    kind: Literal["Certificate"]
    spec: CertificateSpec


# Prometheus operator


class Expression(Part):
    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: list[str] = []


class Selector(Part):
    matchLabels: dict[str, str] = {}  # noqa: N815
    matchExpressions: list[Expression] = []  # noqa: N815


class Relabeling(Part):
    sourceLabels: list[str]  # noqa: N815
    targetLabel: str  # noqa: N815


class MetricsEndpoint(Part):
    port: str
    relabelings: list[Relabeling] = []
    path: Annotated[str, Field(pattern="^/")]
    interval: Duration


class PodMonitorSpec(Part):
    selector: Selector
    podTargetLabels: list[str] = []  # noqa: N815
    podMetricsEndpoints: Annotated[list[MetricsEndpoint], Field(min_length=1)]  # noqa: N815


class PodMonitor(Resource):
    apiVersion: Literal["monitoring.coreos.com/v1"]  # noqa: N815
    kind: Literal["PodMonitor"]
    spec: PodMonitorSpec


class Rule(Part):
    alert: Annotated[str, Field(pattern=r"^[A-Za-z]+$")] | None = None
    record: Annotated[str, Field(pattern=r"^[a-z:_]+$")] | None = None
    expr: str
    # Named as the field is: a word of the language.
    duration: Annotated[Duration | None, Field(alias="for")] = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class RuleGroup(Part):
    name: str
    rules: Annotated[list[Rule], Field(min_length=1)]


class PrometheusRule(Resource):
    apiVersion: Literal["monitoring.coreos.com/v1"]  # noqa: N815
    kind: Literal["PrometheusRule"]
    spec: dict[Literal["groups"], Annotated[list[RuleGroup], Field(min_length=1)]]


# KEDA


class ScalingPolicy(Part):
    type: Literal["Pods", "Percent"]
    value: Annotated[int, Field(gt=0)]
    periodSeconds: Annotated[int, Field(gt=0, le=1800)]  # noqa: N815


class ScalingRules(Part):
    stabilizationWindowSeconds: Annotated[int, Field(ge=0, le=3600)]  # noqa: N815
    policies: Annotated[list[ScalingPolicy], Field(min_length=1)]


class PrometheusQuery(Part):
    serverAddress: Annotated[str, Field(pattern="^https?://")]  # noqa: N815
    query: str
    threshold: Annotated[str, Field(pattern=r"^[0-9.]+$")]
    ignoreNullValues: Literal["true", "false"] = "true"  # noqa: N815


class Trigger(Part):
    type: Literal["prometheus"]
    name: Name
    metricType: Literal["Value", "AverageValue"]  # noqa: N815
    metadata: PrometheusQuery


Behavior = dict[Literal["scaleUp", "scaleDown"], ScalingRules]


class ScaledObjectSpec(Part):
    scaleTargetRef: dict[Literal["name"], Name]  # noqa: N815
    minReplicaCount: Count  # noqa: N815
    maxReplicaCount: Annotated[int, Field(gt=0)]  # noqa: N815
    pollingInterval: Annotated[int, Field(gt=0)]  # noqa: N815
    advanced: dict[Literal["horizontalPodAutoscalerConfig"], dict[Literal["behavior"], Behavior]]
    triggers: Annotated[list[Trigger], Field(min_length=1)]


class ScaledObject(Resource):
    apiVersion: Literal["keda.sh/v1alpha1"]  # noqa: N815
    kind: Literal["ScaledObject"]
    spec: ScaledObjectSpec


KINDS: dict[str, type[Resource]] = {
    kind.__name__: kind for kind in (Issuer, Certificate, PodMonitor, PrometheusRule, ScaledObject)
}
