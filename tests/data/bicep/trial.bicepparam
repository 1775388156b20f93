using '../../../infra/azure-trial/base.bicep'

param suffix = 't01234567'
param uploaderId = '11111111-1111-1111-1111-111111111111'
