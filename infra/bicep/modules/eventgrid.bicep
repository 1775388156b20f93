metadata description = 'An Event Grid topic for CloudEvents, and the identities that may publish to it.'

@minLength(3)
@maxLength(50)
param name string
param location string
param tags object

@description('Principal ids of the publishers.')
param publisherIds string[]

@description('Whether the topic gets an identity of its own, to deliver to queues that accept no keys.')
param hasIdentity bool

@description('Whether public networks may publish, and from which addresses; empty: from all. The template always sets both.')
@allowed(['Enabled', 'Disabled'])
param publicNetworkAccess string
param allowedIpRanges string[]

@description('Resource id of a Log Analytics workspace for logs and metrics; empty: none.')
param workspaceId string

var dataSender = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', 'd5a91429-5739-47e2-a06b-3470a27159e7')

resource topic 'Microsoft.EventGrid/topics@2025-02-15' = {
  name: name
  location: location
  tags: tags
  identity: {
    type: hasIdentity ? 'SystemAssigned' : 'None'
  }
  properties: {
    inputSchema: 'CloudEventSchemaV1_0'
    disableLocalAuth: true
    minimumTlsVersionAllowed: '1.2'
    publicNetworkAccess: publicNetworkAccess
    inboundIpRules: [for ip in allowedIpRanges: {
      ipMask: ip
      action: 'Allow'
    }]
  }
}

resource publisherSends 'Microsoft.Authorization/roleAssignments@2022-04-01' = [for id in publisherIds: {
  scope: topic
  name: guid(topic.id, id, dataSender)
  properties: {
    roleDefinitionId: dataSender
    principalId: id
    principalType: 'ServicePrincipal'
  }
}]

resource logs 'Microsoft.Insights/diagnosticSettings@2021-05-01-preview' = if (!empty(workspaceId)) {
  scope: topic
  name: 'imds-bridge'
  properties: {
    workspaceId: workspaceId
    logs: [
      {
        categoryGroup: 'allLogs'
        enabled: true
      }
    ]
    metrics: [
      {
        category: 'AllMetrics'
        enabled: true
      }
    ]
  }
}

output id string = topic.id
output endpoint string = topic.properties.endpoint
