// Made by scripts/generate.mjs from openapi/; do not edit.
import type {
  CheckChecksPostData,
  CheckChecksPostResponses,
  ChecksChecksGetData,
  ChecksChecksGetResponses,
  EmbedEmbedPostData,
  EmbedEmbedPostResponses,
  GetDistributionGetDistributionPostData,
  GetDistributionGetDistributionPostResponses,
  HealthHealthGetData,
  HealthHealthGetResponses,
  LoadLoadPostData,
  LoadLoadPostResponses,
  MutatedMutatePostData,
  MutatedMutatePostResponses,
  OptimizeOptimizePostData,
  OptimizeOptimizePostResponses,
  RateRatePostData,
  RateRatePostResponses,
  SaveSavePostData,
  SaveSavePostResponses,
  SelectActionSelectActionPostData,
  SelectActionSelectActionPostResponses,
  StatsStatsGetData,
  StatsStatsGetResponses,
  StoreExperienceStoreExperiencePostData,
  StoreExperienceStoreExperiencePostResponses,
  UpdateUpdatePostData,
  UpdateUpdatePostResponses,
} from './prompts/types.gen.js';

/** The routes of prompts: what each takes, and what it answers. */
export interface PromptsRoutes {
  'GET /checks': { takes: ChecksChecksGetData; answers: ChecksChecksGetResponses[keyof ChecksChecksGetResponses] };
  'GET /health': { takes: HealthHealthGetData; answers: HealthHealthGetResponses[keyof HealthHealthGetResponses] };
  'GET /stats': { takes: StatsStatsGetData; answers: StatsStatsGetResponses[keyof StatsStatsGetResponses] };
  'POST /checks': { takes: CheckChecksPostData; answers: CheckChecksPostResponses[keyof CheckChecksPostResponses] };
  'POST /embed': { takes: EmbedEmbedPostData; answers: EmbedEmbedPostResponses[keyof EmbedEmbedPostResponses] };
  'POST /get_distribution': { takes: GetDistributionGetDistributionPostData; answers: GetDistributionGetDistributionPostResponses[keyof GetDistributionGetDistributionPostResponses] };
  'POST /load': { takes: LoadLoadPostData; answers: LoadLoadPostResponses[keyof LoadLoadPostResponses] };
  'POST /mutate': { takes: MutatedMutatePostData; answers: MutatedMutatePostResponses[keyof MutatedMutatePostResponses] };
  'POST /optimize': { takes: OptimizeOptimizePostData; answers: OptimizeOptimizePostResponses[keyof OptimizeOptimizePostResponses] };
  'POST /rate': { takes: RateRatePostData; answers: RateRatePostResponses[keyof RateRatePostResponses] };
  'POST /save': { takes: SaveSavePostData; answers: SaveSavePostResponses[keyof SaveSavePostResponses] };
  'POST /select_action': { takes: SelectActionSelectActionPostData; answers: SelectActionSelectActionPostResponses[keyof SelectActionSelectActionPostResponses] };
  'POST /store_experience': { takes: StoreExperienceStoreExperiencePostData; answers: StoreExperienceStoreExperiencePostResponses[keyof StoreExperienceStoreExperiencePostResponses] };
  'POST /update': { takes: UpdateUpdatePostData; answers: UpdateUpdatePostResponses[keyof UpdateUpdatePostResponses] };
}
