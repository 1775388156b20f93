using '../../../infra/bicep/main.bicep'

param namespaceName = 'contoso-maintenance'
param forwardPrincipalIds = ['11111111-1111-1111-1111-111111111111']
param listenPrincipalIds = ['11111111-1111-1111-1111-111111111111', '22222222-2222-2222-2222-222222222222']
param relayPrincipalIds = ['44444444-4444-4444-4444-444444444444', '44444444-4444-4444-4444-444444444444']
param approverPrincipalIds = ['33333333-3333-3333-3333-333333333333', '33333333-3333-3333-3333-333333333333']
param auditPrincipalIds = ['33333333-3333-3333-3333-333333333333']
param eventGridTopicName = 'contoso-events'
param eventGridIdentity = true
param allowedIpRanges = ['203.0.113.0/24']
param logicAppName = 'contoso'
param teamId = '55555555-5555-5555-5555-555555555555'
param channelId = '19:channel@thread.tacv2'
param functionName = 'contoso'
param functionStorageName = 'contosoaudit'
param functionSigningSecretUrl = 'https://contoso.example/secrets/signing'
param consoleName = 'contoso'
param consoleImage = 'contoso.azurecr.io/imds-bridge:0.1.0'
param consoleClientId = '66666666-6666-6666-6666-666666666666'
param consoleApprovers = ['approver']
param consoleSigningSecretUrl = 'https://contoso.example/secrets/signing'
param actionGroupIds = ['/subscriptions/0/resourceGroups/shop/providers/Microsoft.Insights/actionGroups/on-call']
param workspaceId = '/subscriptions/0/resourceGroups/shop/providers/Microsoft.OperationalInsights/workspaces/central'
