metadata description = 'The rights of the Function app on its storage and its Application Insights; sender.bicep says why they have a module.'

param storageName string
param insightsName string

@description('Whether there is Application Insights.')
param hasInsights bool

@description('Principal id of the Function app.')
param principalId string

var blobDataOwner = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', 'b7e6dc6d-f1e8-4753-8033-0f276bb0955b')
var tableDataContributor = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', '0a9a7e1f-b9d0-4cc4-a60d-0319b160aaa3')
var metricsPublisher = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', '3913510d-42f4-4e42-8a64-420c390055eb')

resource storage 'Microsoft.Storage/storageAccounts@2024-01-01' existing = {
  name: storageName
}

resource insights 'Microsoft.Insights/components@2020-02-02' existing = {
  name: insightsName
}

resource ownsBlobs 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  scope: storage
  name: guid(storage.id, principalId, blobDataOwner)
  properties: {
    roleDefinitionId: blobDataOwner
    principalId: principalId
    principalType: 'ServicePrincipal'
  }
}

resource writesTables 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  scope: storage
  name: guid(storage.id, principalId, tableDataContributor)
  properties: {
    roleDefinitionId: tableDataContributor
    principalId: principalId
    principalType: 'ServicePrincipal'
  }
}

resource publishesMetrics 'Microsoft.Authorization/roleAssignments@2022-04-01' = if (hasInsights) {
  scope: insights
  name: guid(insights.id, principalId, metricsPublisher)
  properties: {
    roleDefinitionId: metricsPublisher
    principalId: principalId
    principalType: 'ServicePrincipal'
  }
}
