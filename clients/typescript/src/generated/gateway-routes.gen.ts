// Made by scripts/generate.mjs from openapi/; do not edit.
import type {
  AddLinkApiProjectsProjectAgentsAgentIdLinksPostData,
  AddLinkApiProjectsProjectAgentsAgentIdLinksPostResponses,
  AddTokenApiProjectsProjectTokensPostData,
  AddTokenApiProjectsProjectTokensPostResponses,
  ArriveApiAuthOidcCallbackGetData,
  CancelApiProjectsProjectJobsJobCancelPostData,
  CancelApiProjectsProjectJobsJobCancelPostResponses,
  ChangePasswordApiAuthPasswordPostData,
  ChangePasswordApiAuthPasswordPostResponses,
  ControlApiProjectsProjectJobsJobControlActionPostData,
  ControlApiProjectsProjectJobsJobControlActionPostResponses,
  CurveApiProjectsProjectJobsJobCurveGetData,
  CurveApiProjectsProjectJobsJobCurveGetResponses,
  EstimateApiProjectsProjectEstimatesPostData,
  EstimateApiProjectsProjectEstimatesPostResponses,
  EventsApiProjectsProjectEventsGetData,
  EventsApiProjectsProjectEventsGetResponses,
  ExportApiProjectsProjectAgentsAgentIdFeedbackGetData,
  ExportApiProjectsProjectAgentsAgentIdFeedbackGetResponses,
  FileOfPageConsoleFileGetData,
  FileOfPageConsoleFileGetResponses,
  FileOfPageRlFileGetData,
  FileOfPageRlFileGetResponses,
  ForbidApiProjectsProjectInjectorsInjectorVetoesPostData,
  ForbidApiProjectsProjectInjectorsInjectorVetoesPostResponses,
  ForgetMeApiMeFeedbackDeleteData,
  ForgetMeApiMeFeedbackDeleteResponses,
  ForgetRaterApiProjectsProjectRatersRaterDeleteData,
  ForgetRaterApiProjectsProjectRatersRaterDeleteResponses,
  GiveApiPoliciesFeedbackAgentIdPostData,
  GiveApiPoliciesFeedbackAgentIdPostResponses,
  HealthApiHealthGetData,
  HealthApiHealthGetResponses,
  InjectorApiProjectsProjectInjectorsInjectorGetData,
  InjectorApiProjectsProjectInjectorsInjectorGetResponses,
  InjectorsApiProjectsProjectInjectorsGetData,
  InjectorsApiProjectsProjectInjectorsGetResponses,
  InviteApiProjectsProjectInvitationsPostData,
  InviteApiProjectsProjectInvitationsPostResponses,
  JobApiProjectsProjectJobsJobGetData,
  JobApiProjectsProjectJobsJobGetResponses,
  JobsApiProjectsProjectJobsGetData,
  JobsApiProjectsProjectJobsGetResponses,
  JoinApiAuthJoinPostData,
  JoinApiAuthJoinPostResponses,
  LateRewardsApiProjectsProjectAgentsAgentIdLateRewardsGetData,
  LateRewardsApiProjectsProjectAgentsAgentIdLateRewardsGetResponses,
  LeaveApiAuthOidcPostData,
  LeaveApiAuthOidcPostResponses,
  LinkPageLinkGetData,
  LinkPageLinkGetResponses,
  LinksApiProjectsProjectAgentsAgentIdLinksGetData,
  LinksApiProjectsProjectAgentsAgentIdLinksGetResponses,
  LogApiProjectsProjectJobsJobLogGetData,
  LogApiProjectsProjectJobsJobLogGetResponses,
  MeApiMeGetData,
  MeApiMeGetResponses,
  MembersApiProjectsProjectMembersGetData,
  MembersApiProjectsProjectMembersGetResponses,
  OfferedApiAuthOidcGetData,
  OfferedApiAuthOidcGetResponses,
  OpenapiApiOpenapiJsonGetData,
  OpenapiApiOpenapiJsonGetResponses,
  PageGetData,
  PageGetResponses,
  PageRlGetData,
  PageRlGetResponses,
  PoliciesApiPoliciesAgentIdGetData,
  PoliciesApiPoliciesAgentIdGetResponses,
  PreferApiProjectsProjectAgentsAgentIdPairsPostData,
  PreferApiProjectsProjectAgentsAgentIdPairsPostResponses,
  ProjectApiProjectsProjectGetData,
  ProjectApiProjectsProjectGetResponses,
  PromoteApiProjectsProjectJobsJobPromotePostData,
  PromoteApiProjectsProjectJobsJobPromotePostResponses,
  RateApiLinkRatingsPostData,
  RateApiLinkRatingsPostResponses,
  ReadAuditApiProjectsProjectAuditGetData,
  ReadAuditApiProjectsProjectAuditGetResponses,
  ReadLinkApiLinkGetData,
  ReadLinkApiLinkGetResponses,
  RemoveMemberApiProjectsProjectMembersUserDeleteData,
  RemoveMemberApiProjectsProjectMembersUserDeleteResponses,
  RevokeLinkApiProjectsProjectLinksLinkDeleteData,
  RevokeLinkApiProjectsProjectLinksLinkDeleteResponses,
  RevokeTokenApiProjectsProjectTokensTokenDeleteData,
  RevokeTokenApiProjectsProjectTokensTokenDeleteResponses,
  RollBackApiProjectsProjectJobsJobRollbackPostData,
  RollBackApiProjectsProjectJobsJobRollbackPostResponses,
  SatisfiedApiProjectsProjectAgentsAgentIdSatisfactionGetData,
  SatisfiedApiProjectsProjectAgentsAgentIdSatisfactionGetResponses,
  SetAutoApiProjectsProjectInjectorsInjectorAutoPutData,
  SetAutoApiProjectsProjectInjectorsInjectorAutoPutResponses,
  SetMemberApiProjectsProjectMembersUserPutData,
  SetMemberApiProjectsProjectMembersUserPutResponses,
  SetTrafficApiProjectsProjectJobsJobTrafficPutData,
  SetTrafficApiProjectsProjectJobsJobTrafficPutResponses,
  SignOutApiAuthSignOutPostData,
  SignOutApiAuthSignOutPostResponses,
  SignUpApiAuthSignUpPostData,
  SignUpApiAuthSignUpPostResponses,
  SubmitApiProjectsProjectJobsPostData,
  SubmitApiProjectsProjectJobsPostResponses,
  TakeInApiProjectsProjectAgentsAgentIdFeedbackPostData,
  TakeInApiProjectsProjectAgentsAgentIdFeedbackPostResponses,
  TakeLateApiProjectsProjectAgentsAgentIdLateRewardsPostData,
  TakeLateApiProjectsProjectAgentsAgentIdLateRewardsPostResponses,
  TakeSessionApiAuthOidcSessionPostData,
  TakeSessionApiAuthOidcSessionPostResponses,
  TellApiProjectsProjectAgentsAgentIdConversationsPostData,
  TellApiProjectsProjectAgentsAgentIdConversationsPostResponses,
  TemplatesApiProjectsProjectTemplatesGetData,
  TemplatesApiProjectsProjectTemplatesGetResponses,
  TokenApiAuthTokenPostData,
  TokenApiAuthTokenPostResponses,
  TokensApiProjectsProjectTokensGetData,
  TokensApiProjectsProjectTokensGetResponses,
  TrainPolicyApiPoliciesTrainPolicyAgentIdPostData,
  TrainPolicyApiPoliciesTrainPolicyAgentIdPostResponses,
  VersionsApiProjectsProjectJobsJobVersionsGetData,
  VersionsApiProjectsProjectJobsJobVersionsGetResponses,
  WeightsApiProjectsProjectJobsJobVersionsVersionWeightsGetData,
  WeightsApiProjectsProjectJobsJobVersionsVersionWeightsGetResponses,
} from './gateway/types.gen.js';

/** The routes of gateway: what each takes, and what it answers. */
export interface GatewayRoutes {
  'DELETE /api/me/feedback': { takes: ForgetMeApiMeFeedbackDeleteData; answers: ForgetMeApiMeFeedbackDeleteResponses[keyof ForgetMeApiMeFeedbackDeleteResponses] };
  'DELETE /api/projects/{project}/links/{link}': { takes: RevokeLinkApiProjectsProjectLinksLinkDeleteData; answers: RevokeLinkApiProjectsProjectLinksLinkDeleteResponses[keyof RevokeLinkApiProjectsProjectLinksLinkDeleteResponses] };
  'DELETE /api/projects/{project}/members/{user}': { takes: RemoveMemberApiProjectsProjectMembersUserDeleteData; answers: RemoveMemberApiProjectsProjectMembersUserDeleteResponses[keyof RemoveMemberApiProjectsProjectMembersUserDeleteResponses] };
  'DELETE /api/projects/{project}/raters/{rater}': { takes: ForgetRaterApiProjectsProjectRatersRaterDeleteData; answers: ForgetRaterApiProjectsProjectRatersRaterDeleteResponses[keyof ForgetRaterApiProjectsProjectRatersRaterDeleteResponses] };
  'DELETE /api/projects/{project}/tokens/{token}': { takes: RevokeTokenApiProjectsProjectTokensTokenDeleteData; answers: RevokeTokenApiProjectsProjectTokensTokenDeleteResponses[keyof RevokeTokenApiProjectsProjectTokensTokenDeleteResponses] };
  'GET /': { takes: PageGetData; answers: PageGetResponses[keyof PageGetResponses] };
  'GET /api/auth/oidc': { takes: OfferedApiAuthOidcGetData; answers: OfferedApiAuthOidcGetResponses[keyof OfferedApiAuthOidcGetResponses] };
  'GET /api/auth/oidc/callback': { takes: ArriveApiAuthOidcCallbackGetData; answers: unknown };
  'GET /api/health': { takes: HealthApiHealthGetData; answers: HealthApiHealthGetResponses[keyof HealthApiHealthGetResponses] };
  'GET /api/link': { takes: ReadLinkApiLinkGetData; answers: ReadLinkApiLinkGetResponses[keyof ReadLinkApiLinkGetResponses] };
  'GET /api/me': { takes: MeApiMeGetData; answers: MeApiMeGetResponses[keyof MeApiMeGetResponses] };
  'GET /api/openapi.json': { takes: OpenapiApiOpenapiJsonGetData; answers: OpenapiApiOpenapiJsonGetResponses[keyof OpenapiApiOpenapiJsonGetResponses] };
  'GET /api/policies/{agent_id}': { takes: PoliciesApiPoliciesAgentIdGetData; answers: PoliciesApiPoliciesAgentIdGetResponses[keyof PoliciesApiPoliciesAgentIdGetResponses] };
  'GET /api/projects/{project}': { takes: ProjectApiProjectsProjectGetData; answers: ProjectApiProjectsProjectGetResponses[keyof ProjectApiProjectsProjectGetResponses] };
  'GET /api/projects/{project}/agents/{agent_id}/feedback': { takes: ExportApiProjectsProjectAgentsAgentIdFeedbackGetData; answers: ExportApiProjectsProjectAgentsAgentIdFeedbackGetResponses[keyof ExportApiProjectsProjectAgentsAgentIdFeedbackGetResponses] };
  'GET /api/projects/{project}/agents/{agent_id}/late-rewards': { takes: LateRewardsApiProjectsProjectAgentsAgentIdLateRewardsGetData; answers: LateRewardsApiProjectsProjectAgentsAgentIdLateRewardsGetResponses[keyof LateRewardsApiProjectsProjectAgentsAgentIdLateRewardsGetResponses] };
  'GET /api/projects/{project}/agents/{agent_id}/links': { takes: LinksApiProjectsProjectAgentsAgentIdLinksGetData; answers: LinksApiProjectsProjectAgentsAgentIdLinksGetResponses[keyof LinksApiProjectsProjectAgentsAgentIdLinksGetResponses] };
  'GET /api/projects/{project}/agents/{agent_id}/satisfaction': { takes: SatisfiedApiProjectsProjectAgentsAgentIdSatisfactionGetData; answers: SatisfiedApiProjectsProjectAgentsAgentIdSatisfactionGetResponses[keyof SatisfiedApiProjectsProjectAgentsAgentIdSatisfactionGetResponses] };
  'GET /api/projects/{project}/audit': { takes: ReadAuditApiProjectsProjectAuditGetData; answers: ReadAuditApiProjectsProjectAuditGetResponses[keyof ReadAuditApiProjectsProjectAuditGetResponses] };
  'GET /api/projects/{project}/events': { takes: EventsApiProjectsProjectEventsGetData; answers: EventsApiProjectsProjectEventsGetResponses[keyof EventsApiProjectsProjectEventsGetResponses] };
  'GET /api/projects/{project}/injectors': { takes: InjectorsApiProjectsProjectInjectorsGetData; answers: InjectorsApiProjectsProjectInjectorsGetResponses[keyof InjectorsApiProjectsProjectInjectorsGetResponses] };
  'GET /api/projects/{project}/injectors/{injector}': { takes: InjectorApiProjectsProjectInjectorsInjectorGetData; answers: InjectorApiProjectsProjectInjectorsInjectorGetResponses[keyof InjectorApiProjectsProjectInjectorsInjectorGetResponses] };
  'GET /api/projects/{project}/jobs': { takes: JobsApiProjectsProjectJobsGetData; answers: JobsApiProjectsProjectJobsGetResponses[keyof JobsApiProjectsProjectJobsGetResponses] };
  'GET /api/projects/{project}/jobs/{job}': { takes: JobApiProjectsProjectJobsJobGetData; answers: JobApiProjectsProjectJobsJobGetResponses[keyof JobApiProjectsProjectJobsJobGetResponses] };
  'GET /api/projects/{project}/jobs/{job}/curve': { takes: CurveApiProjectsProjectJobsJobCurveGetData; answers: CurveApiProjectsProjectJobsJobCurveGetResponses[keyof CurveApiProjectsProjectJobsJobCurveGetResponses] };
  'GET /api/projects/{project}/jobs/{job}/log': { takes: LogApiProjectsProjectJobsJobLogGetData; answers: LogApiProjectsProjectJobsJobLogGetResponses[keyof LogApiProjectsProjectJobsJobLogGetResponses] };
  'GET /api/projects/{project}/jobs/{job}/versions': { takes: VersionsApiProjectsProjectJobsJobVersionsGetData; answers: VersionsApiProjectsProjectJobsJobVersionsGetResponses[keyof VersionsApiProjectsProjectJobsJobVersionsGetResponses] };
  'GET /api/projects/{project}/jobs/{job}/versions/{version}/weights': { takes: WeightsApiProjectsProjectJobsJobVersionsVersionWeightsGetData; answers: WeightsApiProjectsProjectJobsJobVersionsVersionWeightsGetResponses[keyof WeightsApiProjectsProjectJobsJobVersionsVersionWeightsGetResponses] };
  'GET /api/projects/{project}/members': { takes: MembersApiProjectsProjectMembersGetData; answers: MembersApiProjectsProjectMembersGetResponses[keyof MembersApiProjectsProjectMembersGetResponses] };
  'GET /api/projects/{project}/templates': { takes: TemplatesApiProjectsProjectTemplatesGetData; answers: TemplatesApiProjectsProjectTemplatesGetResponses[keyof TemplatesApiProjectsProjectTemplatesGetResponses] };
  'GET /api/projects/{project}/tokens': { takes: TokensApiProjectsProjectTokensGetData; answers: TokensApiProjectsProjectTokensGetResponses[keyof TokensApiProjectsProjectTokensGetResponses] };
  'GET /console/{file}': { takes: FileOfPageConsoleFileGetData; answers: FileOfPageConsoleFileGetResponses[keyof FileOfPageConsoleFileGetResponses] };
  'GET /link': { takes: LinkPageLinkGetData; answers: LinkPageLinkGetResponses[keyof LinkPageLinkGetResponses] };
  'GET /rl': { takes: PageRlGetData; answers: PageRlGetResponses[keyof PageRlGetResponses] };
  'GET /rl/{file}': { takes: FileOfPageRlFileGetData; answers: FileOfPageRlFileGetResponses[keyof FileOfPageRlFileGetResponses] };
  'POST /api/auth/join': { takes: JoinApiAuthJoinPostData; answers: JoinApiAuthJoinPostResponses[keyof JoinApiAuthJoinPostResponses] };
  'POST /api/auth/oidc': { takes: LeaveApiAuthOidcPostData; answers: LeaveApiAuthOidcPostResponses[keyof LeaveApiAuthOidcPostResponses] };
  'POST /api/auth/oidc/session': { takes: TakeSessionApiAuthOidcSessionPostData; answers: TakeSessionApiAuthOidcSessionPostResponses[keyof TakeSessionApiAuthOidcSessionPostResponses] };
  'POST /api/auth/password': { takes: ChangePasswordApiAuthPasswordPostData; answers: ChangePasswordApiAuthPasswordPostResponses[keyof ChangePasswordApiAuthPasswordPostResponses] };
  'POST /api/auth/sign-out': { takes: SignOutApiAuthSignOutPostData; answers: SignOutApiAuthSignOutPostResponses[keyof SignOutApiAuthSignOutPostResponses] };
  'POST /api/auth/sign-up': { takes: SignUpApiAuthSignUpPostData; answers: SignUpApiAuthSignUpPostResponses[keyof SignUpApiAuthSignUpPostResponses] };
  'POST /api/auth/token': { takes: TokenApiAuthTokenPostData; answers: TokenApiAuthTokenPostResponses[keyof TokenApiAuthTokenPostResponses] };
  'POST /api/link/ratings': { takes: RateApiLinkRatingsPostData; answers: RateApiLinkRatingsPostResponses[keyof RateApiLinkRatingsPostResponses] };
  'POST /api/policies/feedback/{agent_id}': { takes: GiveApiPoliciesFeedbackAgentIdPostData; answers: GiveApiPoliciesFeedbackAgentIdPostResponses[keyof GiveApiPoliciesFeedbackAgentIdPostResponses] };
  'POST /api/policies/train_policy/{agent_id}': { takes: TrainPolicyApiPoliciesTrainPolicyAgentIdPostData; answers: TrainPolicyApiPoliciesTrainPolicyAgentIdPostResponses[keyof TrainPolicyApiPoliciesTrainPolicyAgentIdPostResponses] };
  'POST /api/projects/{project}/agents/{agent_id}/conversations': { takes: TellApiProjectsProjectAgentsAgentIdConversationsPostData; answers: TellApiProjectsProjectAgentsAgentIdConversationsPostResponses[keyof TellApiProjectsProjectAgentsAgentIdConversationsPostResponses] };
  'POST /api/projects/{project}/agents/{agent_id}/feedback': { takes: TakeInApiProjectsProjectAgentsAgentIdFeedbackPostData; answers: TakeInApiProjectsProjectAgentsAgentIdFeedbackPostResponses[keyof TakeInApiProjectsProjectAgentsAgentIdFeedbackPostResponses] };
  'POST /api/projects/{project}/agents/{agent_id}/late-rewards': { takes: TakeLateApiProjectsProjectAgentsAgentIdLateRewardsPostData; answers: TakeLateApiProjectsProjectAgentsAgentIdLateRewardsPostResponses[keyof TakeLateApiProjectsProjectAgentsAgentIdLateRewardsPostResponses] };
  'POST /api/projects/{project}/agents/{agent_id}/links': { takes: AddLinkApiProjectsProjectAgentsAgentIdLinksPostData; answers: AddLinkApiProjectsProjectAgentsAgentIdLinksPostResponses[keyof AddLinkApiProjectsProjectAgentsAgentIdLinksPostResponses] };
  'POST /api/projects/{project}/agents/{agent_id}/pairs': { takes: PreferApiProjectsProjectAgentsAgentIdPairsPostData; answers: PreferApiProjectsProjectAgentsAgentIdPairsPostResponses[keyof PreferApiProjectsProjectAgentsAgentIdPairsPostResponses] };
  'POST /api/projects/{project}/estimates': { takes: EstimateApiProjectsProjectEstimatesPostData; answers: EstimateApiProjectsProjectEstimatesPostResponses[keyof EstimateApiProjectsProjectEstimatesPostResponses] };
  'POST /api/projects/{project}/injectors/{injector}/vetoes': { takes: ForbidApiProjectsProjectInjectorsInjectorVetoesPostData; answers: ForbidApiProjectsProjectInjectorsInjectorVetoesPostResponses[keyof ForbidApiProjectsProjectInjectorsInjectorVetoesPostResponses] };
  'POST /api/projects/{project}/invitations': { takes: InviteApiProjectsProjectInvitationsPostData; answers: InviteApiProjectsProjectInvitationsPostResponses[keyof InviteApiProjectsProjectInvitationsPostResponses] };
  'POST /api/projects/{project}/jobs': { takes: SubmitApiProjectsProjectJobsPostData; answers: SubmitApiProjectsProjectJobsPostResponses[keyof SubmitApiProjectsProjectJobsPostResponses] };
  'POST /api/projects/{project}/jobs/{job}/cancel': { takes: CancelApiProjectsProjectJobsJobCancelPostData; answers: CancelApiProjectsProjectJobsJobCancelPostResponses[keyof CancelApiProjectsProjectJobsJobCancelPostResponses] };
  'POST /api/projects/{project}/jobs/{job}/control/{action}': { takes: ControlApiProjectsProjectJobsJobControlActionPostData; answers: ControlApiProjectsProjectJobsJobControlActionPostResponses[keyof ControlApiProjectsProjectJobsJobControlActionPostResponses] };
  'POST /api/projects/{project}/jobs/{job}/promote': { takes: PromoteApiProjectsProjectJobsJobPromotePostData; answers: PromoteApiProjectsProjectJobsJobPromotePostResponses[keyof PromoteApiProjectsProjectJobsJobPromotePostResponses] };
  'POST /api/projects/{project}/jobs/{job}/rollback': { takes: RollBackApiProjectsProjectJobsJobRollbackPostData; answers: RollBackApiProjectsProjectJobsJobRollbackPostResponses[keyof RollBackApiProjectsProjectJobsJobRollbackPostResponses] };
  'POST /api/projects/{project}/tokens': { takes: AddTokenApiProjectsProjectTokensPostData; answers: AddTokenApiProjectsProjectTokensPostResponses[keyof AddTokenApiProjectsProjectTokensPostResponses] };
  'PUT /api/projects/{project}/injectors/{injector}/auto': { takes: SetAutoApiProjectsProjectInjectorsInjectorAutoPutData; answers: SetAutoApiProjectsProjectInjectorsInjectorAutoPutResponses[keyof SetAutoApiProjectsProjectInjectorsInjectorAutoPutResponses] };
  'PUT /api/projects/{project}/jobs/{job}/traffic': { takes: SetTrafficApiProjectsProjectJobsJobTrafficPutData; answers: SetTrafficApiProjectsProjectJobsJobTrafficPutResponses[keyof SetTrafficApiProjectsProjectJobsJobTrafficPutResponses] };
  'PUT /api/projects/{project}/members/{user}': { takes: SetMemberApiProjectsProjectMembersUserPutData; answers: SetMemberApiProjectsProjectMembersUserPutResponses[keyof SetMemberApiProjectsProjectMembersUserPutResponses] };
}
